"""Rotated: quantise after a random rotation, which makes all elements of a size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Bound, Codec, Traits, Waits
from lightning_gc.compressors.quantisers.qsgd import QSGD
from lightning_gc.core import Bucket, Choice, Payload, Wire
from lightning_gc.core.refusal import refuse
from lightning_gc.kernels import splitmix


@dataclass(frozen=True)
class Rotated(Codec):
    """Multiply by a random rotation, quantise, and rotate back on arrival.

    ``C(x) = R⁻¹·Q(R·x)``, ``R = H·D/√n``: D has random signs, which all workers draw equally in
    each step, and H is the Hadamard matrix of n elements, n a power of two. A rotation changes no
    length, so Q's bound is C's; but the largest of n rotated elements is ``O(√(log n / n))·‖x‖``
    with high probability, where one of x may be ``‖x‖``. If levels are fractions of the
    largest element, a quantiser's error becomes nearly that for a normal tensor, for any x. For
    Student's t with 3 degrees of freedom ``QSGD(4)`` has a variance of 0.26·‖x‖², and rotated 0.03.
    A rotation removes zeros, so a quantiser that profits from them sends more.

    Args:
        quantiser: Q, a codec of kind "quantiser" with a mean as its result, by default ``QSGD(2)``.
            Its knob is this compressor's.
        size: n, a power of two from 2 to 65,536. The last elements of a tensor, fewer than n, are
            rotated by smaller powers of two that sum to their number, so none is added. Higher
            spreads single elements farther, and takes log2(n) passes.

    The payload is Q's: 2.06 bits an element for the default.

    Raises:
        ValueError: ``quantiser`` is none, or its result no mean; ``size`` no power of two in
            2..65,536.

    Example:
        >>> from lightning_gc import QSGD, Rotated
        >>> Rotated(QSGD(2)).at(3)
        Rotated(quantiser=QSGD(bits=3, block_size=512, norm='max'), size=1024)

    Reference:
        Suresh, Yu, Kumar and McMahan, "Distributed Mean Estimation with Limited Communication",
        ICML 2017; there Q rounds at random between the smallest and the largest element, and n is
        the whole tensor's, filled up with zeros.
    """

    # Never None after construction. With an instance as default, LightningCLI's parser would mix
    # its fields into the fields of another class that YAML names.
    quantiser: Codec = None  # type: ignore[assignment]
    size: int = 1024

    _turns = "quantiser"

    def __post_init__(self) -> None:
        inner = QSGD(2) if self.quantiser is None else self.quantiser
        if (
            not isinstance(inner, Codec)
            or inner.traits.kind != "quantiser"
            or inner.traits.exact
            or not inner.traits.conserves
        ):
            raise ValueError(
                f"Rotated(quantiser={inner!r}): it must be a quantiser whose result is a mean; use "
                f"QSGD(2), say. Wrappers go around Rotated."
            )
        if self.size not in [2**i for i in range(1, 17)]:
            why = "a Hadamard matrix of a power of two in 2..65,536 elements is needed; use 1024"
            refuse("Rotated", why, size=self.size)
        object.__setattr__(self, "quantiser", inner)

    @property
    def traits(self) -> Traits:
        inner = self.quantiser.traits
        space = (Choice("size", (256, 1024, 4096)), *inner.level_space)
        return dataclasses.replace(inner, elementwise=False, space=space)

    @property
    def waits(self) -> Waits:
        return self.quantiser.waits

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        inner = _rotated(bucket)
        signs = _signs(buffer, inner.generator_seed(shared=True))
        payload = self.quantiser.encode(rotate(buffer.clone(), signs, self.size), inner)
        # What is sent, as receivers have it: x − R⁻¹(R·x − Q) would be off by R's own rounding.
        buffer.sub_(self._sent(payload, signs, inner))
        return payload

    def _sent(self, payload: Payload, signs: Tensor, inner: Bucket) -> Tensor:
        found = torch.zeros_like(signs)
        self.quantiser.decode(payload, found, 1.0, inner)
        return rotate_back(found, signs, self.size)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        inner = _rotated(bucket)
        signs = _signs(out, inner.generator_seed(shared=True))
        out.add_(self._sent(payload, signs, inner), alpha=scale)

    def wire(self, numel: int) -> Wire:
        return self.quantiser.wire(numel)

    def sent(self, payload: Payload, numel: int) -> int:
        return self.quantiser.sent(payload, numel)

    def bound(self, numel: int) -> Bound:
        """Return the quantiser's: a rotation changes no length."""
        return self.quantiser.bound(numel)

    @classmethod
    def examples(cls) -> tuple[Rotated, ...]:
        return (cls(QSGD(3), 64), cls(QSGD(2, 7)))


def rotate(x: Tensor, signs: Tensor, size: int) -> Tensor:
    """Return ``H·D·x/√n``, in place."""
    return _hadamard(x.mul_(signs), size)


def rotate_back(x: Tensor, signs: Tensor, size: int) -> Tensor:
    """Return ``D·H·x/√n``, in place: the inverse of ``rotate``, as H is symmetric."""
    return _hadamard(x, size).mul_(signs)


def _signs(like: Tensor, seed: int) -> Tensor:
    """Return D's diagonal, +1 or −1 each."""
    words = splitmix.words(like.numel(), seed, like.device)
    return words.bitwise_and_(1).mul_(2).sub_(1).to(like.dtype)


def _hadamard(x: Tensor, size: int) -> Tensor:
    """Multiply runs of ``size`` elements, then of smaller powers of two, by ``H/√n``, in place."""
    other = torch.empty_like(x)
    for run, n in _runs(x.numel(), size):
        # Scaled first, or sums of large elements would leave the range.
        part, spare, width = x[run].mul_(1 / math.sqrt(n)), other[run], 1
        while width < n:
            first, second = part.view(-1, 2, width).unbind(1)
            total, difference = spare.view(-1, 2, width).unbind(1)
            torch.add(first, second, out=total)
            torch.sub(first, second, out=difference)
            part, spare, width = spare, part, 2 * width
        if part.data_ptr() != x[run].data_ptr():
            x[run] = part
    return x


def _runs(numel: int, size: int) -> Iterator[tuple[slice, int]]:
    """Yield slices that a rotation of n elements, or several, fit exactly, and n."""
    start, n = 0, size
    while start < numel:
        stop = start + (numel - start) // n * n
        if stop > start:
            yield slice(start, stop), n
        start, n = stop, n // 2


def _rotated(bucket: Bucket) -> Bucket:
    """Return the bucket of the rotated elements, with other random numbers."""
    shapes = {f"{'+'.join(bucket.shapes)}%rotated": (bucket.numel,)}
    return dataclasses.replace(bucket, shapes=shapes, state={})
