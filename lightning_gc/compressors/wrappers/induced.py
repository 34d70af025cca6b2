"""Induced: make a biased compressor unbiased by sending its error with an unbiased one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.base import (
    AbsoluteError,
    Bound,
    Codec,
    Contraction,
    Traits,
    Unbounded,
    Variance,
    Waits,
)
from lightning_gc.compressors.quantisers.qsgd import QSGD
from lightning_gc.compressors.sparsifiers.topk import TopK
from lightning_gc.core import Bucket, Payload, Structure, Wire
from lightning_gc.core.refusal import refuse


@dataclass(frozen=True)
class Induced(Codec):
    """Send a biased codec's payload, and its error by an unbiased codec, in one message.

    ``C(x) = B(x) + U(x − B(x))``. U is unbiased, so C is unbiased and needs no error feedback. Its
    variance is (1 − δ) times U's, where δ is the contraction of B.

    Args:
        biased: B, a codec, by default ``TopK(0.01)``. Its knob is this compressor's knob.
        unbiased: U, an unbiased codec, by default ``QSGD(2)``.

    The payload consists of both payloads: 2.47 bits per element for the defaults.

    Raises:
        ValueError: ``biased`` or ``unbiased`` is not a codec, or its result is not a mean;
            ``biased`` chooses elements by sums over steps; ``unbiased`` is biased.

    Example:
        >>> from lightning_gc import QSGD, Induced, TopK
        >>> Induced(TopK(0.1), QSGD(4)).traits.unbiased
        True

    Reference:
        Horváth and Richtárik, "A Better Alternative to Error Feedback for Communication-Efficient
        Distributed Learning", ICLR 2021.
    """

    # Never None after construction. With instances as defaults, LightningCLI's parser would mix
    # their fields into the fields of another class that YAML names.
    biased: Codec = None  # type: ignore[assignment]
    unbiased: Codec = None  # type: ignore[assignment]

    _turns = "biased"

    def __post_init__(self) -> None:
        first = TopK(0.01) if self.biased is None else self.biased
        second = QSGD(2) if self.unbiased is None else self.unbiased
        for name, codec, example in (("biased", first, TopK(0.01)), ("unbiased", second, QSGD(4))):
            if not isinstance(codec, Codec) or not codec.traits.conserves or codec.traits.exact:
                raise ValueError(
                    f"Induced({name}={codec!r}): {name} must be a codec with an error and with a "
                    f"mean as result; use {example!r}, for example. Wrappers go around Induced."
                )
        if first.traits.needs_sums:
            raise ValueError(
                f"Induced(biased={first!r}): biased chooses elements by sums of errors over steps, "
                f"but Induced leaves no error; use TopK(0.01), for example."
            )
        if not second.traits.unbiased:
            why = "the codec is biased, so the result would be biased too; use QSGD(4), for example"
            refuse("Induced", why, unbiased=second)
        object.__setattr__(self, "biased", first)
        object.__setattr__(self, "unbiased", second)

    @property
    def traits(self) -> Traits:
        both = (self.biased.traits, self.unbiased.traits)
        return Traits(
            kind=self.unbiased.traits.kind,
            unbiased=True,
            reads_model=any(traits.reads_model for traits in both),
            portable=all(traits.portable for traits in both),
            knob=self.biased.traits.knob,
            space=self.biased.traits.level_space,
        )

    @property
    def waits(self) -> Waits:
        both = (self.biased.waits, self.unbiased.waits)
        return Waits(sum(w.least for w in both), sum(w.limit for w in both))

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        first = self.biased.encode(buffer, bucket)
        return *first, *self.unbiased.encode(buffer, _of_error(bucket))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        width = len(self.biased.wire(out.numel()))
        self.biased.decode(payload[:width], out, scale, bucket)
        self.unbiased.decode(payload[width:], out, scale, _of_error(bucket))

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        return self.biased.keeps(shape)

    def wire(self, numel: int) -> Wire:
        return *self.biased.wire(numel), *self.unbiased.wire(numel)

    def bound(self, numel: int) -> Bound:
        """Return ω·(1 − δ), or ω·v² for an absolute error: U compresses the error of B."""
        second = self.unbiased.bound(numel)
        first = self.biased.bound(numel)
        if isinstance(second, Variance) and isinstance(first, AbsoluteError):
            return AbsoluteError(math.sqrt(second.omega) * first.v)
        if not isinstance(second, Variance) or not isinstance(first, Contraction):
            return Unbounded()
        return Variance(second.omega * (1 - first.delta))

    @classmethod
    def examples(cls) -> tuple[Induced, ...]:
        return (cls(TopK(0.1), QSGD(4)), cls(TopK(0.1, selection="sampled"), QSGD(3, 64)))


def _of_error(bucket: Bucket) -> Bucket:
    """Return a bucket for the first codec's error, with other random numbers and without state."""
    shapes = {f"{'+'.join(bucket.shapes)}%error": (bucket.numel,)}
    return dataclasses.replace(bucket, shapes=shapes, state={})
