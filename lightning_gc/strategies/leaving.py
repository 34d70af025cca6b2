"""A process that has used Gloo may end without an abort."""

from __future__ import annotations

import atexit
import time

import torch.distributed as dist

PAUSE = 0.1  # seconds; the threads need the interpreter's lock for microseconds


def let_gloo_finish() -> None:
    """Give way to Gloo's threads, at exit, before the interpreter goes.

    After a collective such a thread still has to let go of its tensor. One that asks for the
    interpreter's lock when the interpreter is on its way out takes the process with it ("terminate
    called without an active exception", SIGABRT), after a run that has gone well. torchrun would
    then start all workers anew. Destroying the group does not help where DDP's reducer still holds
    it (https://github.com/pytorch/pytorch/pull/179291).
    """
    if dist.is_available() and dist.is_initialized():
        time.sleep(PAUSE)


def register() -> None:
    """Have that done when this process ends; once, however often this is called."""
    atexit.unregister(let_gloo_finish)
    atexit.register(let_gloo_finish)
