"""Say in a line what a run does or waits for, where a person looks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

_log, _ours = logging.getLogger(__name__), logging.getLogger("lightning_gc")
FIRST = 10.0
"""Seconds after which a wait is said."""
AGAIN = 30.0
"""Seconds between the lines of one wait."""


def say(sentence: str, *values: object) -> None:
    """Log a line at level INFO; to stderr if the program has configured no logging.

    Args:
        sentence: with placeholders of ``logging``.
        values: for the placeholders.

    Example:
        >>> say("Joined as worker %d.", 2)
    """
    if _log.hasHandlers():
        _log.info(sentence, *values)
    elif max(_log.level, _ours.level, _log.manager.disable + 1) <= logging.INFO:
        # No handler of ours stays: a program that configures logging later would see lines twice.
        line = _log.makeRecord(_log.name, logging.INFO, "", 0, sentence, values, None)
        logging.StreamHandler().handle(line)


@contextlib.contextmanager
def waiting(
    what: str | Callable[[], str], first: float | None = None, again: float | None = None
) -> Iterator[None]:
    """Say ``what`` if the body takes longer than ``first`` seconds, and again while it lasts.

    Args:
        what: the line, or what returns it in the moment in which it is said. The seconds so far
            are added.
        first: seconds until the first line; None: ``FIRST``.
        again: seconds between later lines; None: ``AGAIN``.

    Example:
        >>> with waiting("Waiting for worker 1 to start"):
        ...     pass
    """
    ended = threading.Event()

    def speak() -> None:
        began, limit = time.monotonic(), FIRST if first is None else first
        while not ended.wait(limit):
            said = what if isinstance(what, str) else what()
            limit = AGAIN if again is None else again
            say("%s (%.0f s so far).", said, time.monotonic() - began)

    thread = threading.Thread(target=speak, name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
