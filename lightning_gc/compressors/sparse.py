"""What the sparsifiers share: a payload of values and bit-packed positions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.compressors import checks
from lightning_gc.packing import pack, packed_bytes, unpack


def check_density(name: str, density: float) -> None:
    """Refuse a density that is not in (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}(density={density!r}): density is the share of elements sent and must be in "
            f"(0, 1]; use 0.01 to send one element in a hundred."
        )


def count(density: float, numel: int) -> int:
    """Return how many of ``numel`` elements a density sends: at least one, where there is one."""
    return min(numel, max(1, round(density * numel)))


def index_bits(numel: int) -> int:
    """Return the width of a position in a tensor of ``numel`` elements."""
    return max(1, (numel - 1).bit_length())


def index_bytes(chosen: int, numel: int) -> int:
    """Return the bytes that ``chosen`` packed positions take."""
    return packed_bytes(chosen, index_bits(numel))


def take(buffer: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Move elements out of ``buffer`` into (values, packed indices); the indices must ascend."""
    values = buffer[indices]  # (k,) buffer.dtype
    buffer[indices] = 0
    return values, pack(indices, index_bits(buffer.numel()))


def add(values: Tensor, packed: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale * values`` to ``out`` at the packed positions; O(k), no dense intermediate.

    Raises:
        ValueError: positions outside ``out`` or not ascending, or lengths that disagree.
    """
    bits = index_bits(out.numel())
    dtype = torch.int32 if bits <= 31 else torch.int64  # half the bytes, half the time
    indices = unpack(packed, bits, values.numel(), dtype)  # (k,)
    indices, values = checks.positions(indices, values.to(out.dtype), out.numel())
    out.index_add_(0, indices, values, alpha=scale)
