"""Payload of sparsifiers that send no values: coded positions, and a sign for each."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.compressors.sparsifiers import sparse_codec
from lightning_gc.core import elias_fano, payload_validation
from lightning_gc.core.bit_packing import pack, unpack
from lightning_gc.core.flow import Payload
from lightning_gc.core.wire import Field, Wire
from lightning_gc.kernels.accumulate import accumulate


def both(magnitude: Tensor) -> Tensor:
    """Return ``(-magnitude, magnitude)``, the levels of a method with one magnitude, 0-dim."""
    return torch.stack([-magnitude, magnitude])


def take(buffer: Tensor, chosen: Tensor, levels: Tensor) -> Payload:
    """Subtract ``levels[0]`` from chosen elements that are negative, ``levels[1]`` from others.

    The lengths of the two sign tensors give c, so no receiver has to read it from its device.

    Args:
        buffer: ``(numel,)``, changed in place.
        chosen: ``(c,)`` int64, ascending.
        levels: ``(2,)`` float32.
    """
    negative, levels = buffer[chosen] < 0, levels.to(buffer.dtype)
    buffer[chosen] -= torch.where(negative, levels[0], levels[1])
    return elias_fano.encode(chosen, buffer.numel()), *pack_signs(negative)


def pack_signs(negative: Tensor) -> Payload:
    """Return eight signs per byte, and the last seven or fewer as a byte each."""
    whole = negative.numel() & ~7
    signs = negative.to(torch.uint8)
    return pack(signs[:whole], 1), signs[whole:].clone()


def unpack_signs(signs: Payload) -> Tensor:
    """Return what is negative, ``(c,)`` bool: the inverse of ``pack_signs``."""
    packed, last = signs
    return torch.cat([unpack(packed, 1, 8 * packed.numel(), torch.uint8), last & 1]).bool()


def count(payload: Payload) -> int:
    """Return how many elements a payload carries that ends with those of ``pack_signs``."""
    return 8 * payload[-2].numel() + payload[-1].numel()


def fields(most: int, numel: int) -> Wire:
    """Return the format of ``take`` for up to ``most`` of ``numel`` elements."""
    return sparse_codec.positions_field(most, numel, "worker"), *sign_fields(most)


def sign_fields(most: int) -> Wire:
    """Return the format of ``pack_signs`` for up to ``most`` signs."""
    return (
        Field("signs", torch.uint8, most // 8, "worker", "eight per byte, set where negative"),
        Field("last signs", torch.uint8, min(most, 7), "worker", "one per byte"),
    )


def places(payload: Payload, levels: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the ascending positions of what ``take`` has made, and the level to add at each.

    Raises:
        ValueError: lengths that disagree; on the host, positions outside ``numel`` elements or not
            ascending.
    """
    coded, packed, last = payload
    chosen = count(payload)
    payload_validation.lengths((coded,), elias_fano.coded_bytes(chosen, numel))
    found = elias_fano.decode(coded, chosen, numel, payload_validation.on_host(coded))
    values = torch.where(unpack_signs((packed, last)), levels[0], levels[1])
    return payload_validation.positions(found, values, numel)


def add(payload: Payload, levels: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale`` times the levels of chosen elements to ``out``.

    Raises:
        ValueError: as for ``places``.
    """
    found, values = places(payload, levels.to(out.dtype), out.numel())
    accumulate(out, found, values, scale)
