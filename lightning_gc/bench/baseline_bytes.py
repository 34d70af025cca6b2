"""Bytes that the baselines send, computed, as DDP and torch's hooks do not count them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_gc.bench.baselines import FP16, NONE, PLAIN, POWER_SGD, RANK
from lightning_gc.transports.base import all_reduce_bytes


def computed_bytes(method: str, parameters: Iterable[Tensor], workers: int) -> int:
    """Return the bytes of gradients that one worker sends in a step, by a ring all-reduce.

    Args:
        method: one of ``BASELINES``.
        parameters: those with gradients, which have their dtype.
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
    """Return the elements of P and Q that PowerSGD's hook sends for a gradient."""
    rows = tensor.shape[0] if tensor.dim() else 1
    columns = tensor.numel() // max(rows, 1)
    low = (rows + columns) * min(rows, columns, RANK)
    # PowerSGD's ``min_compression_rate``: tensors that would shrink less are sent dense.
    return low if low * 2 < tensor.numel() else tensor.numel()
