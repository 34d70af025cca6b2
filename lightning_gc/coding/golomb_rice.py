"""Golomb-Rice coding: numbers from 0 up, small ones in few bits, without a table.

The low bits of each number are stored as they are, ``low`` of them; the high part, q, in unary:
q + 1 bits. Numbers whose frequencies fall off exponentially, with a mean of 1 or more, take at most
a quarter of a bit more than their entropy, if ``2^low`` is the power of two next to the median.

Reference:
    Rice, "Some Practical Universal Noiseless Coding Techniques", JPL 1979. Golomb, "Run-Length
    Encodings", IEEE Transactions on Information Theory 1966.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.coding.bit_packing import pack, packed_bytes, unpack
from lightning_gc.coding.elias_fano import decode_heights, encode_heights


def encode(numbers: Tensor, low: int) -> tuple[Tensor, Tensor]:
    """Return low parts and high parts of numbers, ``(c,)`` int64, both uint8.

    Low parts are filled up to whole bytes a bit, ``low · ceil(c/8)`` bytes in all, so that a
    receiver who knows c can tell ``low`` from their length.
    """
    count = numbers.numel()
    if not count:
        return (numbers.new_empty(0, dtype=torch.uint8),) * 2
    heights = (numbers >> low).cumsum(0)
    high = encode_heights(heights, int(heights[-1]) + count)
    if not low:
        return numbers.new_empty(0, dtype=torch.uint8), high
    rest = torch.nn.functional.pad(numbers & ((1 << low) - 1), (0, -count % 8))
    return pack(rest, low), high


def low_bytes(count: int, low: int) -> int:
    """Return the length in bytes of the low parts of ``count`` numbers."""
    return packed_bytes(-(-count // 8) * 8, low)


def decode(
    low_parts: Tensor, high_parts: Tensor, count: int, low: int, beyond: int, look: bool
) -> Tensor:
    """Return ``(count,)`` int64: the inverse of ``encode``.

    The bytes are not trusted: numbers are from 0 to ``2^low`` times the bits of ``high_parts``, and
    the caller must check that. If these have a wrong number of set bits and ``look`` is False, all
    numbers are ``beyond``.

    Args:
        low_parts: ``(low_bytes(count, low),)`` uint8.
        high_parts: uint8.
        count: c.
        low: bits of a low part.
        beyond: a number that the caller does not accept.
        look: read values on the host; False where that would mean waiting for a device.

    Raises:
        ValueError: with ``look``, high parts without exactly ``count`` set bits; low parts of a
            wrong length.
    """
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=high_parts.device)
    length = 8 * high_parts.numel()
    heights, wrong = decode_heights(high_parts, count, length, look)
    numbers = heights.diff(prepend=heights.new_zeros(1)).clamp_(min=0) << low
    if low:
        numbers |= unpack(low_parts, low, -(-count // 8) * 8)[:count]
    return numbers if look else numbers.masked_fill_(wrong, beyond)
