"""A setting of NCCL under which Lightning waits for ever for a worker that has died."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist

_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


def warn_of_blocking_waits(trainer: Any) -> None:
    """Warn if NCCL has no watchdog, and Lightning broadcasts before each batch.

    Lightning 2.6 reads the result on the host, where nothing ends the wait for a dead worker.
    """
    if os.environ.get(_BLOCKING) != "1" or "nccl" not in dist.get_backend_config():
        return
    if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        warnings.warn(
            f"{_BLOCKING}=1 switches NCCL's watchdog off, and this version of Lightning broadcasts "
            f"before each batch without a limit: if a worker dies, the others wait for ever. Unset "
            f"{_BLOCKING}; the watchdog then ends them after the timeout.",
            stacklevel=2,
        )
