"""Streams: tell torch's allocator who uses memory that another stream has allocated."""

from __future__ import annotations

import torch
from torch import Tensor


def used_here(tensor: Tensor) -> None:
    """Keep the memory of ``tensor`` until the current stream has done what is queued by now.

    What a checkpoint restores is allocated by the training thread and replaced by the background
    thread, while that thread's stream has yet to read it. Without this the allocator would give the
    memory to the training thread's next tensor at once. Nothing is done on the host.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
