"""Ascending positions in about 2 + log2(n/k) bits each, in a byte string of known length.

Elias-Fano coding. Of each of k positions in a tensor of n elements the low ``l = floor(log2(n/k))``
bits are stored as they are. What is left, h = position >> l, ascends too, and the i-th sets bit
``h + i`` in a bitmap of ``k + ((n − 1) >> l) + 1`` bits. For density 1 % that makes 8.6 bits, where
the entropy is 8.1 and a plain position in a million elements has 20. The length follows from k and
n alone, so it need not be sent.

Reference:
    Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", JACM 1974.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gc.coding.bit_packing import pack, packed_bytes, unpack


def coded_bytes(chosen: int, numel: int) -> int:
    """Return the length in bytes of ``chosen`` coded positions in ``numel`` elements."""
    if not chosen:
        return 0
    low = _low_bits(chosen, numel)
    return packed_bytes(chosen, low) + packed_bytes(_map_bits(chosen, numel, low), 1)


def encode(positions: Tensor, numel: int) -> Tensor:
    """Return ``(coded_bytes(k, numel),)`` uint8.

    Args:
        positions: ``(k,)`` int64, ascending, below ``numel``.
        numel: how many elements there are.
    """
    chosen = positions.numel()
    if not chosen:
        return positions.new_empty(0, dtype=torch.uint8)
    low = _low_bits(chosen, numel)
    order = torch.arange(chosen, device=positions.device)
    bitmap = torch.zeros(_map_bits(chosen, numel, low), dtype=torch.uint8, device=positions.device)
    bitmap[(positions >> low) + order] = 1
    if not low:
        return pack(bitmap, 1)
    return torch.cat([pack(positions & ((1 << low) - 1), low), pack(bitmap, 1)])


def most_bytes(numel: int) -> int:
    """Return a length that no number of positions in ``numel`` elements exceeds."""
    return packed_bytes(numel, 2) + 3


def decode(data: Tensor, chosen: int, numel: int, look: bool = True) -> Tensor:
    """Return ``(chosen,)`` int64: the inverse of ``encode``.

    The bytes are not trusted: positions may be ``numel`` or more, or not ascend, which is for the
    caller to find, but they are never negative. A bitmap with a wrong number of bits makes all of
    them ``numel`` where one may not look.

    Args:
        data: ``(coded_bytes(chosen, numel),)`` uint8.
        chosen: k.
        numel: n.
        look: the numbers may be read now; False where that would mean waiting for a device.

    Raises:
        ValueError: more positions than elements; where one may look, a bitmap without ``chosen``
            bits set.
    """
    if not chosen:
        return torch.zeros(0, dtype=torch.int64, device=data.device)
    low = _low_bits(chosen, numel)
    cut = packed_bytes(chosen, low)
    length = _map_bits(chosen, numel, low)
    order = torch.arange(chosen, device=data.device)
    if look:
        places = _set_bits(data[cut:], length)
        if places.numel() != chosen:
            raise ValueError(
                f"The payload's bitmap marks {places.numel():,} positions, where there should be "
                f"{chosen:,}; it is damaged."
            )
    else:  # a length that depends on data would make the host wait
        sums = unpack(data[cut:], 1, length, torch.uint8).cumsum(0)
        places = torch.searchsorted(sums, order + 1)
    positions = (places - order) << low
    if low:
        positions |= unpack(data[:cut], low, chosen)
    return positions if look else positions.masked_fill_(sums[-1] != chosen, numel)


def _set_bits(data: Tensor, length: int) -> Tensor:
    """Return the ascending positions of the bits that are set among the first ``length``."""
    if data.device.type != "cpu" or data.shape != (packed_bytes(length, 1),):
        return unpack(data, 1, length, torch.uint8).nonzero().view(-1)
    bits = np.unpackbits(data.numpy(), count=length, bitorder="little")
    return torch.from_numpy(np.flatnonzero(bits.view(bool)))  # a sixth of the time of uint8


def _low_bits(chosen: int, numel: int) -> int:
    if chosen > numel:
        raise ValueError(
            f"The payload names {chosen:,} positions of a tensor of {numel:,} elements."
        )
    return (numel // chosen).bit_length() - 1


def _map_bits(chosen: int, numel: int, low: int) -> int:
    return chosen + ((numel - 1) >> low) + 1
