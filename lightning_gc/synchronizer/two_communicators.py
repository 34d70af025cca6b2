"""Two communicators: where collectives of DDP's group can meet ours in another order elsewhere.

Gradients have a process group of their own, whose collectives run beside those that DDP's group has
within a backward pass. With NCCL these are two communicators on one GPU. It works while the kernels
of both find room there; where they queue up behind each other, in an order that differs between
workers, each worker waits for another one's second kernel.
"""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def warn_of_one_queue(ddp: DistributedDataParallel) -> None:
    """Warn if kernels of both groups share the one queue that the environment leaves a GPU."""
    backends = dist.get_backend_config(ddp.process_group)
    if "nccl" not in backends or os.environ.get(_QUEUES) != "1":
        return
    others = []
    if any(isinstance(child, nn.SyncBatchNorm) for child in ddp.module.modules()):
        others.append("SyncBatchNorm")
    if ddp.find_unused_parameters:
        others.append("find_unused_parameters=True")
    if others:
        warnings.warn(
            f"{_QUEUES}=1 gives a GPU one queue, in which the exchange of gradients and the "
            f"collectives of {' and '.join(others)} can stand in another order on another worker: "
            f"then all wait for ever. Unset {_QUEUES}, or go without.",
            stacklevel=2,
        )
