"""Encode k ascending positions below n by Elias-Fano, in about 2 + log2(n/k) bits each.

The low ``l = floor(log2(n/k))`` bits of each position are stored as they are. The high parts,
h = position >> l, also ascend. The i-th one sets bit ``h + i`` in a bitmap of
``k + ((n − 1) >> l) + 1`` bits. At a density of 1 % a position takes 8.6 bits; its entropy is 8.1,
and a plain index into a million elements takes 20. The length follows from k and n and is not sent.

Reference:
    Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", JACM 1974.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack, packed_bytes, unpack

_LAYOUTS = 4096
"""Numbers of positions and elements with remembered lengths: a model has few of them."""


@functools.lru_cache(_LAYOUTS)
def coded_bytes(chosen: int, numel: int) -> int:
    """Return the length in bytes of ``chosen`` coded positions in ``numel`` elements."""
    if not chosen:
        return 0
    low = _low_bits(chosen, numel)
    return packed_bytes(chosen, low) + packed_bytes(_map_bits(chosen, numel, low), 1)


@functools.lru_cache(_LAYOUTS)
def layout(chosen: int, numel: int) -> tuple[int, int]:
    """Return the number of low bits, and the length in bytes of all of them."""
    low = _low_bits(chosen, numel) if chosen else 0
    return low, packed_bytes(chosen, low)


@functools.lru_cache(_LAYOUTS)
def map_bits(chosen: int, numel: int) -> int:
    """Return the length in bits of the bitmap."""
    return _map_bits(chosen, numel, _low_bits(chosen, numel)) if chosen else 0


def encode(positions: Tensor, numel: int) -> Tensor:
    """Return ``(coded_bytes(k, n),)`` uint8 for ascending int64 positions below n, ``(k,)``."""
    chosen = positions.numel()
    if not chosen:
        return positions.new_empty(0, dtype=torch.uint8)
    low = _low_bits(chosen, numel)
    bitmap = encode_heights(positions >> low, _map_bits(chosen, numel, low))
    if not low:
        return bitmap
    return torch.cat([pack(positions & ((1 << low) - 1), low), bitmap])


def most_bytes(numel: int) -> int:
    """Return an upper bound of ``coded_bytes`` over all counts of positions."""
    return packed_bytes(numel, 2) + 3


def decode(data: Tensor, chosen: int, numel: int, look: bool = True) -> Tensor:
    """Return ``(chosen,)`` int64: the inverse of ``encode``.

    The bytes are not trusted. Positions are never negative, but may be ``numel`` or more, or may
    not ascend; the caller must check this. If the bitmap has a wrong number of set bits and
    ``look`` is False, all positions are ``numel``.

    Args:
        data: ``(coded_bytes(k, n),)`` uint8.
        chosen: k.
        numel: n.
        look: read values on the host. False avoids waiting for an accelerator.

    Raises:
        ValueError: more positions than elements. With ``look`` also a bitmap that does not have
            exactly ``chosen`` set bits.
    """
    if not chosen:
        return torch.zeros(0, dtype=torch.int64, device=data.device)
    low = _low_bits(chosen, numel)
    cut = packed_bytes(chosen, low)
    length = _map_bits(chosen, numel, low)
    heights, wrong = decode_heights(data[cut:], chosen, length, look)
    positions = heights << low
    if low:
        positions |= unpack(data[:cut], low, chosen)
    return positions if look else positions.masked_fill_(wrong, numel)


def encode_heights(heights: Tensor, length: int) -> Tensor:
    """Return a bitmap in which bit ``h_i + i`` is set, ``(packed_bytes(length, 1),)`` uint8.

    Height h_i is thus coded in unary: h_i − h_(i−1) clear bits, then a set bit.

    Args:
        heights: ``(c,)`` int64, non-descending, from 0 to ``length − c``.
        length: bits of the bitmap.
    """
    order = torch.arange(heights.numel(), device=heights.device)
    bitmap = torch.zeros(length, dtype=torch.uint8, device=heights.device)
    bitmap.index_fill_(0, heights + order, 1)
    return pack(bitmap, 1)


def decode_heights(data: Tensor, count: int, length: int, look: bool) -> tuple[Tensor, Tensor]:
    """Return heights, ``(count,)`` int64, and a 0-dim bool: whether the bitmap is wrong.

    Args:
        data: ``(packed_bytes(length, 1),)`` uint8.
        count: c, above 0.
        length: bits of the bitmap.
        look: as for ``decode``.

    Raises:
        ValueError: with ``look``, a bitmap that does not have exactly ``count`` set bits. Without
            ``look`` such a bitmap is reported as wrong; heights are 0 to ``length`` in any order.
    """
    order = torch.arange(count, device=data.device)
    if look:
        places = set_bits(data, length)
        refuse_marks(places.numel(), count)
        return places - order, torch.zeros((), dtype=torch.bool, device=data.device)
    # A data-dependent length would make the host wait for the accelerator.
    sums = unpack(data, 1, length, torch.uint8).cumsum(0)
    places = torch.searchsorted(sums, order + 1)
    wrong = sums[-1] != count if length else torch.ones((), dtype=torch.bool, device=data.device)
    return places - order, wrong


def set_bits(data: Tensor, length: int) -> Tensor:
    """Return the ascending positions of the set bits among the first ``length``."""
    if data.device.type != "cpu" or data.shape != (packed_bytes(length, 1),):
        return unpack(data, 1, length, torch.uint8).nonzero().view(-1)
    bits = np.unpackbits(data.numpy(), count=length, bitorder="little")
    return torch.from_numpy(np.flatnonzero(bits.view(bool)))  # six times as fast as for uint8


def refuse_marks(found: int, count: int) -> None:
    """Raise ValueError unless a bitmap has as many set bits as it should have."""
    if found != count:
        raise ValueError(
            f"The payload's bitmap marks {found:,} positions, but should mark {count:,}; it is "
            f"damaged."
        )


def check_count(chosen: int, numel: int) -> None:
    """Raise ValueError if there are more positions than elements."""
    if chosen > numel:
        raise ValueError(f"The payload names {chosen:,} positions of {numel:,} elements.")


def _low_bits(chosen: int, numel: int) -> int:
    check_count(chosen, numel)
    return (numel // chosen).bit_length() - 1


def _map_bits(chosen: int, numel: int, low: int) -> int:
    return chosen + ((numel - 1) >> low) + 1
