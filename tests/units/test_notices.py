"""A wait is said when it is long, again while it lasts, and not at all when it is short."""

import logging
import threading

import pytest

from lightning_gc.core import notices
from lightning_gc.core.notices import waiting
from lightning_gc.transports.peer_error import awaiting_peers
from tests.support.waits import hearing, held


def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, notices.__name__), waiting("Waiting for nobody"):
        pass
    assert not caplog.messages


def test_a_line_comes_again_while_the_wait_lasts() -> None:
    said: list[int] = []
    thrice = threading.Event()

    def what() -> str:
        said.append(len(said))
        if len(said) == 3:
            thrice.set()
        return f"Waiting, line {len(said)}"

    with hearing("Waiting, line 2 (0 s so far)", lambda: None), waiting(what):
        held(thrice)


def test_the_first_line_may_come_earlier_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "FIRST", 3600.0)
    said = threading.Event()

    def what() -> str:
        said.set()
        return "Waiting"

    with waiting(what, first=0.01):
        held(said)


@pytest.mark.parametrize(
    ("worker", "workers", "whom"),
    [(0, 2, "worker 1"), (1, 2, "worker 0"), (1, 3, "the 2 other workers")],
)
def test_a_worker_names_the_others(worker: int, workers: int, whom: str) -> None:
    said = threading.Event()
    with (
        hearing(f"Waiting for {whom} to start (", said.set),
        awaiting_peers("start", worker, workers),
    ):
        held(said)


def test_the_only_worker_waits_for_nobody() -> None:
    with awaiting_peers("start", 0, 1):
        assert "notices" not in {thread.name for thread in threading.enumerate()}


def test_a_line_leaves_no_handler_and_obeys_a_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that configures logging later sees each line once; a quiet one sees none."""
    monkeypatch.setattr(logging.root, "handlers", [])
    ours = logging.getLogger("lightning_gc")
    notices.say("Joined as worker %d.", 2)
    assert capsys.readouterr().err == "Joined as worker 2.\n"
    assert not ours.handlers
    assert not logging.getLogger(notices.__name__).handlers
    monkeypatch.setattr(ours, "level", logging.WARNING)
    notices.say("Joined as worker %d.", 3)
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    notices.say("Joined as worker %d.", 4)
    assert capsys.readouterr().err == ""
