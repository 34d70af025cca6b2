"""A wait is said when it is long, again while it lasts, and not at all when it is short."""

import logging
import threading

import pytest

from lightning_gc.core import notices
from lightning_gc.core.notices import waiting
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
