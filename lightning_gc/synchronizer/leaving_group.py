"""Leaving a process group: together with the others, or alone after a failure."""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist
from torch.distributed import distributed_c10d

_GRACE = 10.0  # seconds


def leave(group: dist.ProcessGroup, failed: bool) -> None:
    """Destroy the group; with NCCL, which then waits for the others, abort it after a failure.

    The others may wait in a collective that will never end, and this worker's error is shown only
    when it has left. NCCL's kernels are ended by an abort, so that neither this device nor the end
    of the process waits for them. To leave a group of Gloo is local, and tells the others at once.

    Args:
        group: no other thread uses it any more.
        failed: whether this worker stops by an error.
    """
    if not dist.is_initialized():
        return
    if failed and waits_for_others(group):
        # An abort waits too, where others do not answer.
        thread = threading.Thread(target=_abort, args=(group,), daemon=True)
        thread.start()
        thread.join(_GRACE)
    else:
        dist.destroy_process_group(group)


def waits_for_others(group: dist.ProcessGroup) -> bool:
    """Return whether destroying the group is a collective."""
    return "nccl" in dist.get_backend_config(group)


def _abort(group: dist.ProcessGroup) -> None:
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        with contextlib.suppress(Exception):  # what counts is the error that led here
            abort(group)
