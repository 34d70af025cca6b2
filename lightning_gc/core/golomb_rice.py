"""Encode non-negative integers by Golomb-Rice: ``low`` bits as they are, the rest in unary.

A number takes ``low + 1 + (number >> low)`` bits. Low parts and unary high parts are separate
tensors, so that both directions need no loop over the numbers.

Reference:
    Golomb, "Run-Length Encodings", IEEE Transactions on Information Theory 1966.
"""

import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.core.elias_fano import decode_heights, refuse_marks, set_bits

_PIECE = 1 << 16  # elements, so that on the host intermediate tensors stay in the cache


def pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """Return views of parts of ``flat`` that fit into a processor's cache; on a GPU all of it."""
    views: tuple[Tensor, ...] = flat.split(
        _PIECE if flat.device.type == "cpu" else max(1, flat.numel())
    )
    return views


def encode(numbers: Tensor, low: int) -> tuple[Tensor, Tensor]:
    """Return low parts and high parts of numbers, ``(c,)`` of an integer dtype, both uint8.

    Low parts are filled up to whole bytes a bit, ``low · ceil(c/8)`` bytes in all, so that a
    receiver who knows c can tell ``low`` from their length.
    """
    count = numbers.numel()
    if not count:
        return (numbers.new_empty(0, dtype=torch.uint8),) * 2
    highs = numbers >> low if low else numbers
    bitmap = numbers.new_zeros(count + int(highs.sum()), dtype=torch.uint8)
    stop = torch.full((), -1, dtype=torch.int64, device=numbers.device)
    for piece in pieces(highs):
        ends = piece.to(torch.int64, copy=True).add_(1).cumsum_(0).add_(stop)
        bitmap.index_fill_(0, ends, 1)
        stop = ends[-1]
    high = pack(bitmap, 1)
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
    if look:
        numbers = _read(high_parts, count).bitwise_left_shift_(low)
    else:
        heights, wrong = decode_heights(high_parts, count, 8 * high_parts.numel(), look)
        numbers = heights.diff(prepend=heights.new_zeros(1)).clamp_(min=0) << low
    if low:
        kind = torch.uint8 if low <= 8 else torch.int64
        numbers |= unpack(low_parts, low, -(-count // 8) * 8, kind)[:count]
    return numbers if look else numbers.masked_fill_(wrong, beyond)


def _read(high_parts: Tensor, count: int) -> Tensor:
    """Return ``(count,)`` int64: the clear bits before each set bit.

    Raises:
        ValueError: other than ``count`` set bits.
    """
    numbers = torch.empty(count, dtype=torch.int64, device=high_parts.device)
    start, found, before = 0, 0, numbers.new_full((1,), -1)
    for piece in pieces(high_parts):
        places = set_bits(piece, 8 * piece.numel()) + start
        if 0 < places.numel() <= count - found:
            numbers[found : found + places.numel()] = places.diff(prepend=before) - 1
            before = places[-1:]
        start += 8 * piece.numel()
        found += places.numel()
    refuse_marks(found, count)
    return numbers
