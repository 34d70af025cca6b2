"""End a training process cleanly: no orphaned workers, no abort of Gloo's threads at exit."""

from __future__ import annotations

import atexit
import subprocess
import time
from typing import Any

import torch.distributed as dist

PAUSE = 0.1  # seconds; the threads need the interpreter's lock for microseconds
GRACE = 10.0  # seconds that a child has for an error of its own


def end_children(launcher: Any) -> None:
    """Wait for the processes that a script's launcher has started, then kill what is left.

    A worker that is stopped, or waits for a peer that is gone, would stay for ever, or for the
    timeout: Lightning's launcher leaves it alone when worker 0 fails. Other launchers have
    parents that see to it.
    """
    deadline = time.monotonic() + GRACE
    for process in getattr(launcher, "procs", ()):
        if not isinstance(process, subprocess.Popen):
            continue
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
