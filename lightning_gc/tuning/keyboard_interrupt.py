"""Raise Ctrl-C again where Python has dropped it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupt_check() -> Iterator[Callable[[], None]]:
    """Record Ctrl-C; yield a function that raises KeyboardInterrupt if there was one.

    Call it between two runs. Python prints and forgets exceptions in destructors and in callbacks
    from C, where short trials spend much of their time.
    """
    pressed = threading.Event()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if in_main else None
    if not callable(before):  # not the main thread, ignored, or not Python's to handle
        yield check
        return

    def record(number: int, frame: Any) -> None:
        pressed.set()
        before(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
