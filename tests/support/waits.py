"""Hold one side of a wait up until the other side has said what it waits for."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_gc.core import notices

LONGEST = 60.0  # seconds after which a line that does not come is given up


class _Listener(logging.Handler):
    def __init__(self, sentence: str, said: Callable[[], object]) -> None:
        super().__init__()
        self.sentence, self.said = sentence, said
        self.heard = False

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if not self.heard and all(piece in line for piece in self.sentence.split("...")):
            self.heard = True
            self.said()


@contextlib.contextmanager
def hearing(sentence: str, said: Callable[[], object]) -> Iterator[None]:
    """Let waits be said at once, and call ``said`` at the first line that has the sentence.

    Between the pieces of a sentence, separated by ``...``, may be anything.
    """
    logger = logging.getLogger(notices.__name__)
    before = notices.FIRST, notices.AGAIN, logger.level
    listener = _Listener(sentence, said)
    notices.FIRST = notices.AGAIN = 0.01
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        yield
        assert listener.heard, f"nobody has said: {sentence}"
    finally:
        logger.removeHandler(listener)
        notices.FIRST, notices.AGAIN = before[:2]
        logger.setLevel(before[2])


def held(event: threading.Event | Path) -> None:
    """Return when the event is set, or the file exists: the other side has said its line."""
    given_up = time.monotonic() + LONGEST
    while not (event.exists() if isinstance(event, Path) else event.is_set()):
        assert time.monotonic() < given_up, "the line has not come"
        time.sleep(0.005)
