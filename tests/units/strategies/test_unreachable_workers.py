"""Where Gloo would announce the loopback interface, the one that leads to worker 0 is named."""

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gc.lightning.workarounds import Joining
from lightning_gc.transports import interfaces
from lightning_gc.transports.interfaces import VARIABLE, Way, interface_of, named_interface
from lightning_gc.transports.peer_error import peers_in_words

HERE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2"), ("lo", "::1"), ("eth0", "fd00::2")]
DEBIAN = Way("debian", "127.0.1.1", "10.0.0.2", "eth0")


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def named(way: Way, patch: pytest.MonkeyPatch) -> tuple[str | None, list[str]]:
    """Return the variable within the context, and what was said."""
    patch.setattr(interfaces, "way_to", lambda main: way)
    said: list[str] = []
    with named_interface("main", said.append):
        return os.environ.get(VARIABLE), said


def test_the_way_to_worker_0_is_named_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    name, said = named(DEBIAN, monkeypatch)
    assert name == "eth0"
    assert said == [
        "The name of this machine, debian, has the address 127.0.1.1, which other machines cannot "
        "reach. Gloo uses eth0 (10.0.0.2), which they can reach."
    ]
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    "way",
    [
        Way("cluster", "10.0.0.2", "10.0.0.2", "eth0"),
        Way("debian", "127.0.1.1", "127.0.0.1", None),  # all workers are here
        Way("debian", "127.0.1.1", "", None),  # torch says that worker 0 is not found
        Way("six", "fd00::2", "fd00::2", "eth0"),
        Way("six", "::1", "::1", None),
    ],
)
def test_nothing_is_done_where_others_can_connect(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named(way, monkeypatch) == (None, [])


def test_the_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    assert named(DEBIAN, monkeypatch) == ("ib0", [])
    assert os.environ[VARIABLE] == "ib0"


def test_an_address_without_interface_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way("debian", "127.0.1.1", "10.0.0.2", None)
    with pytest.warns(UserWarning, match=rf"address 127\.0\.1\.1.*set {VARIABLE} .* such as eth0"):
        assert named(way, monkeypatch) == (None, [])


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.2", "eth0"),
        ("fd00::2", "eth0"),
        ("fd00::2%eth0", "eth0"),
        ("127.0.0.1", None),
        ("10.0.0.3", None),
        ("", None),
    ],
)
def test_interface_of_an_address(address: str, found: str | None) -> None:
    assert interface_of(address, HERE) == found


def test_an_address_of_the_loopback_interface_has_no_name() -> None:
    """Gloo would announce the first address of that interface, 127.0.0.1."""
    assert interface_of("10.9.9.9", [*HERE, ("lo", "10.9.9.9")]) is None


def test_interfaces_of_this_machine() -> None:
    """As the system itself names them."""
    assert ("127.0.0.1") in [address for _, address in interfaces.interfaces()]
    assert {name for name, _ in interfaces.interfaces()} <= {n for _, n in socket.if_nameindex()}
    way = interfaces.way_to("127.0.0.1")
    assert (way.own, way.interface, way.hidden) == ("127.0.0.1", None, False)
    assert interfaces.way_to("a name of nobody").own == ""


def test_a_name_with_another_machines_address_is_as_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo takes the loopback address for a name that it cannot bind."""
    family, kind = socket.AF_INET, socket.SOCK_STREAM
    found = [(family, kind, 6, "", ("192.0.2.77", 0)), (family, kind, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    assert interfaces.announced_address("moved") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert interfaces.announced_address("moved") == "127.0.0.1"


class Strategy:
    """What ``Joining`` has of Lightning's strategies."""

    def __init__(self, nodes: int, device: str, backend: str | None) -> None:
        self.num_nodes, self.root_device = nodes, torch.device(device)
        self.process_group_backend, self._timeout = backend, None
        self.cluster_environment = SimpleNamespace(main_address="main", local_rank=lambda: 0)
        self.ended = False

    def teardown(self) -> None:
        self.ended = True


class Joins(Joining, Strategy):  # type: ignore[misc]
    """A strategy."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((2, "cpu", None), "eth0"),
        ((2, "cuda", "cpu:gloo,cuda:nccl"), "eth0"),
        ((2, "cuda", None), None),  # NCCL chooses by itself
        ((1, "cpu", None), None),
    ],
)
def test_every_strategy_names_it_until_teardown(
    given: tuple[int, str, str | None], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "way_to", lambda main: DEBIAN)
    strategy: Any = Joins(*given)
    with ExitStack() as joined:
        joined.enter_context(strategy._patiently())
        assert os.environ.get(VARIABLE) == expected
    assert os.environ.get(VARIABLE) == expected  # for the groups of the exchange
    strategy.teardown()
    assert VARIABLE not in os.environ
    assert strategy.ended


@pytest.mark.parametrize(("main", "name"), [("main", "here eth0"), (None, "such as eth0")])
def test_gloos_failure_to_connect_names_the_interface(
    main: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "way_to", lambda main: DEBIAN)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if main is not None:
        monkeypatch.setenv("MASTER_ADDR", main)
    error = RuntimeError("Gloo connectFullMesh failed with timed out connecting")
    said = peers_in_words(error, "a collective", 1, 2)
    assert said.startswith("Worker 1 could not connect to worker 0.")
    assert VARIABLE in said
    assert name in said
