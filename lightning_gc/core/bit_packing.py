"""Pack n codes of b bits each into exactly ceil(n * b / 8) bytes, and unpack them.

Each full byte of a code is stored in a separate plane, and the remainder of r = 1 to 7 bits in the
last plane. So 20-bit indices take two byte planes and one plane of half bytes. Code i occupies bits
``[i*r, (i+1)*r)`` of the remainder plane's little-endian bit string.
"""

import functools

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
        above = codes >> (8 * whole) if whole else codes
        planes.append(_pack_narrow(above.to(torch.uint8), rest))
    return planes[0] if len(planes) == 1 else torch.cat(planes)


def unpack(data: Tensor, bits: int, numel: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the ``numel`` codes in ``data`` as ``dtype``: the inverse of ``pack``.

    Codes are in ``[0, 2**bits)`` for any bytes. Bits after the last code are ignored.

    Raises:
        ValueError: ``data`` does not have the length of ``numel`` codes, or ``dtype`` is too
            narrow.
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
        codes |= plane.to(dtype).bitwise_left_shift_(8 * i)
    return codes


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits={bits} is outside 1..{MAX_BITS}, the widths that can be packed.")


# Width that divides 8 -> word dtype with one byte for each code that shares a packed byte.
_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}


def _pack_narrow(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes of 1..7 bits, up to eight at a time in the bytes of a word."""
    numel = codes.numel()
    group = 8 // bits if bits in _WORDS else 8  # codes that together fill whole bytes
    short = -numel % group
    if short:
        codes = torch.cat([codes, codes.new_zeros(short)])
    dtype = _WORDS.get(bits, torch.int64)
    if codes.storage_offset() % dtype.itemsize or not codes.is_contiguous():
        codes = codes.clone()
    words = codes.view(dtype)
    if bits in _WORDS:
        # Each term of the product moves code i from bit 8·i to bit i·bits of the highest byte. The
        # other codes move to bits without overlap.
        highest = 8 * (group - 1)
        packed = words * _gathering(bits)
        return (packed >> highest).bitwise_and_(255).to(torch.uint8)
    for lane, used in ((8, bits), (16, 2 * bits), (32, 4 * bits)):  # halves move together
        low, high = _halves(lane, used)
        words = (words & low).bitwise_or_((words & high) >> (lane - used))
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: -(-numel * bits // 8)]


def _unpack_narrow(data: Tensor, bits: int, numel: int) -> Tensor:
    """Return uint8 codes: the inverse of ``_pack_narrow``."""
    if bits == 1:  # copy the byte once per bit, keep that bit and move it down
        words = data.to(torch.int64).mul_(_repeated(1, 8)).bitwise_and_(_ONE_OF_EACH)
        words = words.add_(_repeated(127, 8)).bitwise_right_shift_(7).bitwise_and_(_repeated(1, 8))
        return words.view(torch.uint8)[:numel]
    if bits in _WORDS:
        words = data.to(_WORDS[bits])
        for lane in (16, 8)[bits // 4 :]:  # copy the upper half to the next lane
            half = lane * bits // 8
            both = _repeated((1 << half) - 1, lane) & ((1 << 8 * words.itemsize) - 1)
            words |= words << (lane - half)
            words &= both
        return words.view(torch.uint8)[:numel]
    groups = -(-numel // 8)
    by_byte = data.new_zeros(groups, 8)
    full, tail = divmod(data.numel(), bits)
    by_byte[:full, :bits] = data[: full * bits].view(full, bits)
    if tail:
        by_byte[full, :tail] = data[full * bits :]
    words = by_byte.view(torch.int64).view(-1)
    for lane, used in ((32, 4 * bits), (16, 2 * bits), (8, bits)):  # halves move apart
        low, high = _halves(lane, used)
        words = (words & low).bitwise_or_((words << (lane - used)).bitwise_and_(high))
    return words.view(torch.uint8)[:numel]


# The masks below are cached, since making them takes as long as packing a small tensor.
@functools.cache
def _gathering(bits: int) -> int:
    """Return the factor that moves all codes of a word into its highest byte."""
    group = 8 // bits
    return sum(1 << (8 * (group - 1) - i * (8 - bits)) for i in range(group))


@functools.cache
def _repeated(pattern: int, every: int) -> int:
    """Return a signed 64-bit number that repeats ``pattern`` at every ``every``-th bit."""
    number = sum(pattern << i for i in range(0, 64, every)) & ((1 << 64) - 1)
    return number - (number >> 63 << 64)


@functools.cache
def _halves(lane: int, used: int) -> tuple[int, int]:
    """Return two masks of the ``used`` low bits: of even lanes and of odd lanes."""
    low = _repeated((1 << used) - 1, 2 * lane)
    return low, low << lane if lane < 32 else ((1 << used) - 1) << 32


_ONE_OF_EACH = sum(1 << 9 * i for i in range(8)) - (1 << 64)  # bit i of byte i
