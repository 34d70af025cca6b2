"""A machine that announces the loopback interface to other machines is warned of, with the fix."""

import socket
import warnings

import pytest

from lightning_gc.lightning.workarounds import warn_of_loopback
from lightning_gc.transports.peer_error import peers_in_words

NAMES = {"debian": "127.0.1.1", "cluster": "10.0.0.2", "main": "10.0.0.1", "localhost": "127.0.0.1"}


def starts(host: str, main: str, patch: pytest.MonkeyPatch) -> None:
    def address(name: str) -> str:
        if name not in NAMES:
            raise socket.gaierror
        return NAMES[name]

    patch.setattr(socket, "gethostname", lambda: host)
    patch.setattr(socket, "gethostbyname", address)
    warn_of_loopback(main)


@pytest.mark.parametrize("host", ["debian", "unknown"])
def test_the_loopback_interface(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.warns(UserWarning, match=rf"{host}, has the address 127\..*set GLOO_SOCKET_IFNAME"):
        starts(host, "main", monkeypatch)


@pytest.mark.parametrize(
    ("host", "main", "interface"),
    [("cluster", "main", None), ("debian", "localhost", None), ("debian", "main", "eth0")],
)
def test_all_else_is_not_warned_of(
    host: str, main: str, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        starts(host, main, monkeypatch)


def test_gloos_failure_to_connect_names_the_interface() -> None:
    error = RuntimeError("Gloo connectFullMesh failed with timed out connecting")
    said = peers_in_words(error, "a collective", 1, 2)
    assert said.startswith("Worker 1 could not connect to worker 0.")
    assert "GLOO_SOCKET_IFNAME" in said
