"""Gloo's exit: wait at the end of a process for Gloo's threads, which else abort it."""

from __future__ import annotations

import atexit
import time

PAUSE = 0.1  # seconds; the threads need the interpreter's lock for microseconds


def let_gloo_finish() -> None:
    """Wait at exit until Gloo's threads have released their tensors.

    They need the interpreter's lock for that. If it is already finalising, the process aborts
    ("terminate called without an active exception", SIGABRT) after a successful run, and torchrun
    would restart all workers. That the group has been destroyed does not help while DDP's reducer
    still holds it (https://github.com/pytorch/pytorch/pull/179291).
    """
    time.sleep(PAUSE)


def register() -> None:
    """Register the exit handler (idempotent)."""
    atexit.unregister(let_gloo_finish)
    atexit.register(let_gloo_finish)
