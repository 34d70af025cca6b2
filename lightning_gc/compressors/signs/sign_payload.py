"""What the sign methods share: one bit an element, and a number for either value of it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.coding import payload_validation
from lightning_gc.coding.bit_packing import pack, packed_bytes, unpack
from lightning_gc.flow import Payload


def mean(parts: Tensor, count: int | Tensor) -> Tensor:
    """Return the mean of ``count`` numbers, 0-dim float32; 0 of none."""
    number = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
    # Divided before they are added: 1e30 times a million elements would be infinite.
    return (parts / number).sum().float()


def take(buffer: Tensor, levels: Tensor) -> Tensor:
    """Take ``levels[1]`` out of what is not negative and ``levels[0]`` out of the rest.

    Returns:
        ``(ceil(numel / 8),)`` uint8: a bit an element, set where it is not negative.
    """
    positive = buffer >= 0
    buffer.sub_(_pick(positive, levels.to(buffer.dtype)))
    return pack(positive.to(torch.uint8), 1)


def checked(payload: Payload, numel: int, levels: int) -> tuple[Tensor, Tensor]:
    """Return bits and levels whose lengths are right."""
    payload_validation.lengths(payload, packed_bytes(numel, 1), levels)
    bits, magnitudes = payload
    return bits, magnitudes


def add(bits: Tensor, levels: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale·levels[1]`` where the bit is set and ``scale·levels[0]`` where it is not."""
    positive = unpack(bits, 1, out.numel(), torch.uint8).bool()
    out.add_(_pick(positive, levels.to(out.dtype)), alpha=scale)


def _pick(positive: Tensor, levels: Tensor) -> Tensor:
    return torch.where(positive, levels[1], levels[0])
