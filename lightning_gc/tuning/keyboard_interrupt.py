"""Ctrl-C is heard, even where Python drops it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], None]]:
    """Note Ctrl-C beside raising it, and yield a function that raises it again if it was lost.

    Python prints and forgets an exception in a destructor or in a callback from C, and where
    trials are short much of the time goes by in these. What is yielded is to be called between two
    runs.

    Raises:
        KeyboardInterrupt: from the function, if it has been asked for.
    """
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check  # signals go to the main thread
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or not Python's to handle
        yield check
        return

    def note(number: int, frame: Any) -> None:
        asked.set()
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
