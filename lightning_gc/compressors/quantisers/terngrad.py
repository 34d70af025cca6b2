"""TernGrad: send −1, 0 or 1 for each element, drawn at random, and one scale for all workers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Collective
from lightning_gc.compressors.bounds import Multiple, Variance
from lightning_gc.compressors.quantisers import integer_sums
from lightning_gc.compressors.traits import Traits
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow
from lightning_gc.core.search_space import Choice
from lightning_gc.core.wire import Wire

_BITS = 2  # of a ternary code
CLIPS = Choice("clip", (1.5, 2.0, 2.5, 3.0, 4.0, None))
"""Numbers of standard deviations worth trying."""


@dataclass(frozen=True)
class TernGrad(Collective):
    """Send the sign of an element with a probability proportional to its magnitude, else zero.

    With ``y = min(max(x, −c·σ), c·σ)`` on each worker, ``σ = √(mean x²)`` and the scale
    ``S = max_w ‖y_w‖_∞`` of all workers: ``C(x)_i = S·sign(y_i)·b_i`` where ``P(b_i = 1) =
    |y_i| / S``, so that ``E C(x) = y``. What is clipped away is dropped, as is all of the error:
    the paper has no error feedback. Without clipping this is ``IntegerQSGD(bits=2)``.

    One scale for all workers is the paper's "scaler sharing"; its formula, and surveys, have each
    worker's own, ``S = ‖x‖_∞``, with which sums of codes would not be exact:
    ``IndependentTernGrad``.

    σ is taken about zero, as in the paper's analysis; about the mean, as in its code, a constant
    tensor would be clipped to nothing.

    Args:
        clip: c, at how many standard deviations elements are clipped. Lower means less variance,
            more bias. None does not clip, and then it is unbiased.

    Communication pattern:
        Three rounds, as of ``IntegerQSGD``, with the scale for the norm ("scaler sharing"). Per
        worker ``(2 + ⌈log2(2·W + 1)⌉)·(W−1)/W`` bits an element: 2 + 5 for 8 workers.

    Raises:
        ValueError: ``clip`` not above 0.

    Example:
        >>> from lightning_gc import TernGrad
        >>> TernGrad().traits.unbiased, TernGrad(clip=None).traits.unbiased
        (False, True)

    Reference:
        Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad: Ternary Gradients to Reduce Communication
        in Distributed Deep Learning", NeurIPS 2017.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        check_clip("TernGrad", self.clip)

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(
            kind="quantiser",
            unbiased=self.clip is None,
            default_memory="none",
            space=(CLIPS,),
        )

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        own = integer_sums.largest(buffer)
        excess = None
        if self.clip is not None:
            own = torch.minimum(own, self.clip * deviation(buffer, own))
            clipped = buffer.clamp(-own, own)
            excess = buffer - clipped
            buffer.copy_(clipped)
        scale = yield from integer_sums.agreed(own)
        payloads = integer_sums.take(buffer, scale, _BITS, bucket)
        if excess is not None:
            buffer.add_(excess)
        yield from integer_sums.add(self, payloads, scale, _BITS, bucket, out)

    def bound(self, numel: int) -> Variance | Multiple:
        """Return ω = (√d − 1)/2 unclipped, and 1 + c²/8 (c − 1 from c = 4 on) where it clips.

        Both for one worker, with its own scale; the first also for the gradients of W workers taken
        as one tensor of W·d elements.

        Where it clips: with S = 1 the error is ``Σ x² + Σ |y|·(1 − 2·|x|)``. If an element is
        clipped, then S = c·σ and ``‖x‖² = d/c²``. A term of the second sum is 1/8 at most, at
        |x| = 1/4, which makes ``1 + c²/8``; and as it is at most a concave function of x²,
        ``|x| − 2·x²`` up to there and 1/8 beyond, the sum is for c ≥ 4 at most that of d elements
        |x| = 1/c, which makes ``c − 1``. If no element is clipped, the error is ``Σ|x| − Σx²`` with
        ``mean x² ≥ 1/c²``: again c − 1 at most, never above ``1 + c²/8``. And c ≥ √d clips nothing,
        since no element is above ``√d·σ``.
        """
        return bound(self.clip, numel)

    def wire(self, numel: int) -> Wire:
        return integer_sums.wire("scale", numel, _BITS)

    @classmethod
    def examples(cls) -> tuple[TernGrad, ...]:
        return (cls(), cls(clip=0.5), cls(clip=None))


def check_clip(name: str, clip: float | None) -> None:
    """Refuse what is no number of standard deviations."""
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(
            f"{name}(clip={clip!r}): clip is a number of standard deviations, above 0; use the "
            f"paper's 2.5, or None not to clip."
        )


def bound(clip: float | None, numel: int) -> Variance | Multiple:
    """Return the bound that ``TernGrad.bound`` derives."""
    unclipped = integer_sums.variance(numel, _BITS)
    if clip is None:
        return Variance(unclipped)
    if clip**2 >= numel:
        return Multiple(unclipped)
    return Multiple(1 + clip**2 / 8 if clip < 4 else clip - 1)


def deviation(buffer: Tensor, largest: Tensor) -> Tensor:
    """Return the standard deviation about zero, ``(1,)``, of elements up to ``largest``."""
    # Squares of 1e-30 and 1e30 leave float32's range; those of x / max do not.
    unit = buffer / largest.where(largest > 0, 1.0)
    length: Tensor = torch.linalg.vector_norm(unit) / math.sqrt(max(1, buffer.numel()))
    return (largest * length).float()
