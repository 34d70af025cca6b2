"""Sign payloads: one bit for each element, or Elias-Fano positions and a sign for each of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.joint import JointTable, WholeCodec
from lightning_gc.compressors.sparsifiers import sparse_codec
from lightning_gc.core import Bucket, Field, Payload, Wire, elias_fano, payload_validation
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.kernels import signs
from lightning_gc.kernels.accumulate import accumulate
from lightning_gc.kernels.dispatch import compiled


class TwoLevels(Codec):
    """Send a bit per element and the levels of its two values: (signs, levels).

    ``kernels.signs`` says in which order means are added.

    Attributes:
        levels: what the two levels are; see ``kernels.signs.SignTable``.
    """

    levels: ClassVar[signs.Levels]

    @property
    def whole(self) -> WholeCodec:
        return WholeCodec(self, kind=self, joint=JointSigns)


class JointSigns(JointTable):
    """Encode and decode all parts of a bucket at once, in kernels where there are some."""

    family = "signs"

    @functools.cached_property
    def settings(self) -> tuple[Any, ...]:
        return (self.codec.levels,)

    @property
    def in_rows(self) -> bool:
        return True

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        super().receive_all(payloads, out, bucket, averaged=averaged)
        whole = bucket.name_of("") == ""  # votes on a shard are encoded again, as they are
        if whole and self.codec.levels == "votes" and self.table(out) is None:
            for part in self.parts:
                decide(out[part.start : part.stop], len(payloads))


def decide(out: Tensor, workers: int) -> None:
    """Replace means of W votes by their signs, in place."""
    # The mean of W votes is at least 1/W in magnitude, or zero up to rounding.
    out.masked_fill_(out.abs() < signs.least_of(workers), 0).sign_()


def mean(numbers: Tensor, count: int | Tensor) -> Tensor:
    """Return the sum of ``numbers`` divided by ``count``, 0-dim float32; 0 without numbers.

    On the host numbers are added in the order of ``kernels.signs``. On an accelerator torch adds in
    its own order, in one operation.

    Args:
        numbers: ``(n,)``.
        count: a number, or a tensor of one on the device; less than 1 counts as 1.

    Example:
        >>> mean(torch.tensor([3.0, 1.0]), 2)
        tensor(2.)
    """
    if numbers.device.type != "cpu":
        number = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        return (numbers / number).sum().float()
    if not numbers.numel():
        return numbers.new_zeros((), dtype=torch.float32)
    share = signs.share_of(int(count))
    if compiled(numbers, "signs"):
        from lightning_gc.kernels.host import signs as host

        return host.mean(numbers, share)
    return signs.by_torch(numbers, share)


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


def both(magnitude: Tensor) -> Tensor:
    """Return ``(-magnitude, magnitude)``, the levels of a method with one magnitude, 0-dim."""
    return torch.stack([-magnitude, magnitude])


def take_chosen(buffer: Tensor, chosen: Tensor, levels: Tensor) -> Payload:
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
    """Return a mask of negative elements, ``(c,)`` bool: the inverse of ``pack_signs``."""
    packed, last = signs
    return torch.cat([unpack(packed, 1, 8 * packed.numel(), torch.uint8), last & 1]).bool()


def count(payload: Payload) -> int:
    """Return the number of signs in a payload that ends with the output of ``pack_signs``."""
    return 8 * payload[-2].numel() + payload[-1].numel()


def chosen_fields(most: int, numel: int) -> Wire:
    """Return the format of ``take_chosen`` for up to ``most`` of ``numel`` elements."""
    return sparse_codec.positions_field(most, numel, "worker"), *sign_fields(most)


def sign_fields(most: int) -> Wire:
    """Return the format of ``pack_signs`` for up to ``most`` signs."""
    return (
        Field("signs", torch.uint8, most // 8, "worker", "eight per byte, set where negative"),
        Field("last signs", torch.uint8, min(most, 7), "worker", "one per byte"),
    )


def places(payload: Payload, levels: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the ascending positions in a payload of ``take_chosen``, and the level at each.

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


def add_chosen(payload: Payload, levels: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale`` times the levels of chosen elements to ``out``.

    Raises:
        ValueError: as for ``places``.
    """
    found, values = places(payload, levels.to(out.dtype), out.numel())
    accumulate(out, found, values, scale)
