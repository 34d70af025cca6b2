"""Equal start: all workers take over worker 0's parameters and buffers, as DDP does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def take_over(module: nn.Module) -> None:
    """Broadcast parameters and buffers of worker 0.

    Communication pattern:
        One broadcast in the default group per tensor that is not empty. Shapes must be equal.
    """
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                flat = tensor.detach().reshape(-1).contiguous()
                dist.broadcast(flat.view(torch.uint8), src=0)  # bytes: Gloo has not every dtype
                tensor.data.copy_(flat.view(tensor.shape))
