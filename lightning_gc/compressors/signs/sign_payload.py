"""Payload of sign methods: one bit per element, each value of which stands for a level."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.core.wire import Field


def mean(parts: Tensor, count: int | Tensor) -> Tensor:
    """Return the mean of ``count`` numbers, 0-dim float32; 0 of none."""
    number = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
    # Divided before they are added: 1e30 times a million elements would be infinite.
    return (parts / number).sum().float()


def take(buffer: Tensor, levels: Tensor) -> Tensor:
    """Subtract ``levels[1]`` from elements not negative, ``levels[0]`` from others; return bits."""
    positive, levels = buffer >= 0, levels.to(buffer.dtype)
    buffer.sub_(torch.where(positive, levels[1], levels[0]))
    return pack(positive.to(torch.uint8), 1)


def field(numel: int, set_where: str = "not negative") -> Field:
    """Return the format of one bit per element."""
    return Field("signs", torch.uint8, packed_bytes(numel, 1), note=f"bits, set where {set_where}")


def add(bits: Tensor, levels: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale·levels[1]`` where the bit is set and ``scale·levels[0]`` where it is not."""
    positive, levels = unpack(bits, 1, out.numel(), torch.uint8).bool(), levels.to(out.dtype)
    out.add_(torch.where(positive, levels[1], levels[0]), alpha=scale)
