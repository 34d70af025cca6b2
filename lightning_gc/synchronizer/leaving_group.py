"""Leaving a process group: it is destroyed if all has gone well, and abandoned after a failure."""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist

_GRACE = 10.0  # seconds


def leave(group: dist.ProcessGroup) -> None:
    """Destroy the group, together with the other workers. With NCCL this waits for them."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def abandon(group: dist.ProcessGroup) -> None:
    """Give the group up without the others, who may wait in a collective that will never end.

    To destroy it would wait for them, and so keep this worker's error from being shown. NCCL's
    kernels are aborted, so that neither this device nor the end of the process waits for them; Gloo
    has nothing to abort: the others notice when this process ends.
    """
    abort = getattr(group, "abort", None)  # torch 2.6 has none
    if abort is not None:
        thread = threading.Thread(target=_quietly, args=(abort,), daemon=True)
        thread.start()
        thread.join(_GRACE)


def _quietly(abort: object) -> None:
    assert callable(abort)
    with contextlib.suppress(Exception):  # what counts is the error that led here
        abort()
