"""Bytes that peers send, computed: DDP and torch's hooks count none."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_gc.bench.baselines import FP16, NONE, PLAIN, POWER_SGD, RANK
from lightning_gc.transports.base import all_reduce_bytes

_WORTH = 2
"""PowerSGD's ``min_compression_rate``: what shrinks less than so many times goes dense."""


def computed_bytes(method: str, parameters: Iterable[Tensor], workers: int) -> int:
    """Return what one worker sends in a step for gradients, by a ring all-reduce.

    Args:
        method: one of ``PEERS``.
        parameters: those that are trained; gradients have their dtype.
        workers: W.
    """
    sizes = {
        NONE: lambda p: 0,
        PLAIN: lambda p: p.numel() * p.element_size(),
        FP16: lambda p: p.numel() * 2,
        POWER_SGD: lambda p: low_rank_numel(p) * p.element_size(),
    }
    return all_reduce_bytes(sum(map(sizes[method], parameters)), workers)


def low_rank_numel(tensor: Tensor) -> int:
    """Return how many numbers PowerSGD's hook sends for a gradient, its matrices P and Q."""
    rows = tensor.shape[0] if tensor.dim() else 1
    columns = tensor.numel() // max(rows, 1)
    low = (rows + columns) * min(rows, columns, RANK)
    return low if low * _WORTH < tensor.numel() else tensor.numel()
