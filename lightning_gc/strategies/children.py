"""No worker outlives the one that has launched it."""

from __future__ import annotations

import subprocess
import time
from typing import Any

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
