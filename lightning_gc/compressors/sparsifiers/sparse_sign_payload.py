"""What sparsifiers share that send no values: positions, and of each which of two levels it has."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.coding import elias_fano, payload_validation
from lightning_gc.coding.bit_packing import pack, unpack
from lightning_gc.compressors.sparsifiers import sparse_payload
from lightning_gc.flow import Limits, Payload
from lightning_gc.kernels.accumulate import accumulate

Places = tuple[Tensor, Tensor]
"""Positions, ascending, and what is added there."""


def both(magnitude: Tensor) -> Tensor:
    """Return the levels of a method with one magnitude, 0-dim: ``(-magnitude, magnitude)``."""
    return torch.stack([-magnitude, magnitude])


def take(buffer: Tensor, chosen: Tensor, levels: Tensor) -> Payload:
    """Take ``levels[0]`` out of chosen elements that are negative and ``levels[1]`` out of others.

    Args:
        buffer: ``(numel,)``, changed in place.
        chosen: ``(c,)`` int64, ascending.
        levels: ``(2,)`` float32.

    Returns:
        ``positions  # (coded_bytes(c, numel),) uint8``, Elias-Fano coded
        ``signs      # (floor(c / 8),) uint8``, eight elements a byte, set where negative
        ``last       # (c mod 8,) uint8``: the signs of the last elements, one a byte. So lengths
        tell c, and no receiver has to read it from its device.
    """
    negative = buffer[chosen] < 0
    buffer[chosen] -= _pick(negative, levels.to(buffer.dtype))
    whole = chosen.numel() & ~7
    signs = negative.to(torch.uint8)
    packed, last = pack(signs[:whole], 1), signs[whole:].clone()
    return elias_fano.encode(chosen, buffer.numel()), packed, last


def count(payload: Payload) -> int:
    """Return how many elements a payload carries whose last tensors are those of ``take``."""
    return 8 * payload[-2].numel() + payload[-1].numel()


def limits(most: int, numel: int) -> Limits:
    """Return the most elements of the three tensors for up to ``most`` of ``numel`` elements."""
    return sparse_payload.most_index_bytes(most, numel), most // 8, min(most, 7)


def check(payload: Payload, numel: int, *before: int, most: int | None = None) -> None:
    """Refuse a payload unless it is tensors of lengths ``before``, and then those of ``take``.

    Args:
        payload: what has arrived.
        numel: how many elements the tensor has.
        before: lengths of the tensors before the last three.
        most: how many elements the sender may send; all of them where None.

    Raises:
        ValueError: other lengths, or more elements.
    """
    number, signs, last = count(payload), payload[-2].numel(), payload[-1].numel()
    coded = sparse_payload.index_bytes(min(number, numel), numel)
    payload_validation.lengths(payload, *before, coded, signs, min(last, 7))
    if number > (numel if most is None else most):
        raise ValueError(
            f"The payload names {number:,} positions of a tensor of {numel:,} elements, of which "
            f"at most {numel if most is None else most:,} are sent; its sender has another "
            f"configuration."
        )


def places(payload: Payload, levels: Tensor, numel: int) -> Places:
    """Return where the three tensors of ``take`` add which of two levels.

    Args:
        payload: those three, of which ``check`` has seen the lengths.
        levels: ``(2,)``, of the dtype that is added.
        numel: how many elements the tensor has.

    Raises:
        ValueError: on the host, positions outside the tensor or not ascending.
    """
    coded, packed, last = payload
    found = elias_fano.decode(coded, count(payload), numel, payload_validation.on_host(coded))
    signs = torch.cat([unpack(packed, 1, 8 * packed.numel(), torch.uint8), last & 1])
    return payload_validation.positions(found, _pick(signs.bool(), levels), numel)


def add(payload: Payload, levels: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale`` times the levels to ``out`` where the three tensors of ``take`` say.

    Raises:
        ValueError: as for ``places``.
    """
    found, values = places(payload, levels.to(out.dtype), out.numel())
    accumulate(out, found, values, scale)


def _pick(negative: Tensor, levels: Tensor) -> Tensor:
    return torch.where(negative, levels[0], levels[1])
