"""Process shutdown: kill orphaned workers; wait for Gloo's threads at exit, which else abort."""

from __future__ import annotations

import atexit
import subprocess
import time
from typing import Any

import torch.distributed as dist

PAUSE = 0.1  # seconds; the threads need the interpreter's lock for microseconds
GRACE = 10.0  # seconds for a child to report its own error


def end_children(launcher: Any) -> None:
    """Wait for the processes that Lightning's subprocess launcher has started, then kill the rest.

    When worker 0 fails, that launcher, unlike others, does not kill them: a stopped one would stay
    for ever.
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
    """Wait at exit until Gloo's threads have released their tensors.

    They need the interpreter's lock for that. If it is already finalising, the process aborts
    ("terminate called without an active exception", SIGABRT) after a successful run, and torchrun
    would restart all workers. Destroying the group does not help while DDP's reducer still holds
    it (https://github.com/pytorch/pytorch/pull/179291).
    """
    if dist.is_available() and dist.is_initialized():
        time.sleep(PAUSE)


def register() -> None:
    """Register the exit handler (idempotent)."""
    atexit.unregister(let_gloo_finish)
    atexit.register(let_gloo_finish)
