"""Bit packing: n codes of b bits each in exactly ceil(n * b / 8) bytes, and unpacking.

A code is split into whole bytes, each stored in its own plane, and a remainder of r = 1 to 7 bits:
20-bit indices are two byte planes and one plane of half bytes. Code i occupies bits
``[i*r, (i+1)*r)`` of the remainder plane's little-endian bit string.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BITS = 56


def packed_bytes(numel: int, bits: int) -> int:
    """Return the length in bytes of ``numel`` packed codes of ``bits`` bits."""
    whole, rest = divmod(bits, 8)
    return numel * whole + -(-numel * rest // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack non-negative integer codes below ``2**bits`` into bytes.

    Args:
        codes: ``(n,)``, any integer dtype wide enough for the values.
        bits: 1..56, the width of one code.

    Returns:
        ``(packed_bytes(n, bits),)`` uint8.
    """
    _check_bits(bits)
    whole, rest = divmod(bits, 8)
    planes = [(codes >> (8 * i)).bitwise_and_(255).to(torch.uint8) for i in range(whole)]
    if rest:
        planes.append(_pack_narrow((codes >> (8 * whole)).to(torch.uint8), rest))
    return planes[0] if len(planes) == 1 else torch.cat(planes)


def unpack(data: Tensor, bits: int, numel: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the ``numel`` codes in ``data`` as ``dtype``: the inverse of ``pack``.

    Codes are in ``[0, 2**bits)`` whatever the bytes; bits after the last code are ignored.

    Raises:
        ValueError: ``data`` has not the length of ``numel`` codes, or ``dtype`` is too narrow.
    """
    _check_bits(bits)
    if torch.iinfo(dtype).max < (1 << bits) - 1:
        raise ValueError(f"Codes of {bits} bits do not fit into {dtype}; unpack them as int64.")
    if data.dtype != torch.uint8 or data.shape != (packed_bytes(numel, bits),):
        raise ValueError(
            f"{numel} codes of {bits} bits take {packed_bytes(numel, bits)} bytes, but the payload "
            f"has {tuple(data.shape)} of {data.dtype}; sender and receiver disagree on the format."
        )
    whole, rest = divmod(bits, 8)
    planes = [data[i * numel : (i + 1) * numel] for i in range(whole)]
    if rest:
        planes.append(_unpack_narrow(data[whole * numel :], rest, numel))
    codes = planes[0].to(dtype, copy=whole > 0)
    for i, plane in enumerate(planes[1:], start=1):
        codes |= plane.to(dtype) << (8 * i)
    return codes


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits={bits} is outside 1..{MAX_BITS}, the widths that can be packed.")


# Width that divides 8 -> a word with one byte for each of the codes that share a packed byte.
_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}


def _pack_narrow(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes of 1..7 bits, up to eight at a time in the bytes of a word."""
    numel = codes.numel()
    group = 8 // bits if bits in _WORDS else 8  # codes that together fill whole bytes
    short = -numel % group
    if short:
        codes = torch.cat([codes, codes.new_zeros(short)])
    if bits in _WORDS:
        # Code i of a word moves from bit 8·i to i·bits; other bits end outside the low byte.
        if codes.storage_offset() % _WORDS[bits].itemsize or not codes.is_contiguous():
            codes = codes.clone()
        words = codes.view(_WORDS[bits])
        packed = words.clone()
        for i in range(1, group):
            packed |= words >> (i * (8 - bits))
        return packed.bitwise_and_(255).to(torch.uint8)
    columns = codes.view(-1, group)
    words = torch.zeros(len(columns), dtype=torch.int64, device=codes.device)
    for i in range(group):
        words |= columns[:, i].to(torch.int64) << (i * bits)
    by_byte = words.view(torch.uint8).view(-1, 8)[:, :bits]
    return by_byte.reshape(-1)[: -(-numel * bits // 8)]


def _unpack_narrow(data: Tensor, bits: int, numel: int) -> Tensor:
    """Return uint8 codes: the inverse of ``_pack_narrow``."""
    mask = (1 << bits) - 1
    if bits in _WORDS:
        packed = data.to(_WORDS[bits])
        words = packed.clone()
        for i in range(1, 8 // bits):
            words |= packed << (i * (8 - bits))
        words &= sum(mask << 8 * i for i in range(8 // bits))
        return words.view(torch.uint8)[:numel]
    groups = -(-numel // 8)
    by_byte = data.new_zeros(groups, 8)
    full, tail = divmod(data.numel(), bits)
    by_byte[:full, :bits] = data[: full * bits].view(full, bits)
    if tail:
        by_byte[full, :tail] = data[full * bits :]
    words = by_byte.view(torch.int64).view(-1)
    columns = data.new_empty(groups, 8)
    for i in range(8):
        columns[:, i] = (words >> (i * bits)).bitwise_and_(mask)
    return columns.view(-1)[:numel]
