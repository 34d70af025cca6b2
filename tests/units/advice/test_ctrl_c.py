"""Ctrl-C ends a measurement at once, and is the user's own again after it."""

import signal
import threading

import pytest

from lightning_gc.advice.advising import stopping_at_once


def test_what_was_there_before_is_there_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopping_at_once(0):
        assert signal.getsignal(signal.SIGINT) != before
    with pytest.raises(ZeroDivisionError), stopping_at_once(0):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) == before


def test_beside_the_main_thread_nothing_is_changed() -> None:
    seen = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with stopping_at_once(0):
            seen.append(signal.getsignal(signal.SIGINT) == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert seen == [True]
