"""Process shutdown: kill orphaned workers."""

from __future__ import annotations

import subprocess
import time
from typing import Any

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
