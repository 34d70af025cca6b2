"""What the sparsifiers share: a payload of values and bit-packed positions."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Move the elements at ``indices`` out of ``buffer`` into (values, packed indices)."""
    values = buffer[indices]  # (k,) buffer.dtype
    buffer[indices] = 0
    return values, pack(indices, index_bits(buffer.numel()))


def add(values: Tensor, packed: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale * values`` to ``out`` at the packed positions; O(k), no dense intermediate.

    Raises:
        ValueError: a position lies outside ``out``, or lengths disagree.
    """
    indices = unpack(packed, index_bits(out.numel()), values.numel())  # (k,) int64
    check_indices(indices, out.numel())
    out.index_add_(0, indices, values.to(out.dtype), alpha=scale)


def check_indices(indices: Tensor, numel: int) -> None:
    """Refuse positions outside ``[0, numel)``: bytes from the network are not trusted."""
    if not indices.numel():
        return
    if indices.device.type != "cpu":  # checked on the device: the host must not wait for it
        torch._assert_async((indices < numel).all())
        return
    worst = int(indices.max())
    if worst >= numel:
        raise ValueError(
            f"A payload names element {worst} of a tensor of {numel} elements; the message is "
            f"damaged or its sender runs another model."
        )
