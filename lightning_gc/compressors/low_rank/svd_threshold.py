"""SVDThreshold: send the singular triplets with values of at least a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import AbsoluteError, Knob, Traits, Waits
from lightning_gc.compressors.low_rank.factorisation import sides
from lightning_gc.compressors.low_rank.singular_triplets import SingularTriplets
from lightning_gc.core import Bucket, Range

_LARGEST = 2.0**16  # times the threshold: above that length float32's rounding might reach it
_ROUNDING = 2.0**-4  # in thresholds: see bound


@dataclass(frozen=True)
class SVDThreshold(SingularTriplets):
    """Send the singular triplets with ``σ_i ≥ λ``, however many; keep the others as the error.

    With ``M = Σ σ_i·u_i·v_iᵀ``: ``C = Σ_{σ_i ≥ λ} σ_i·u_i·v_iᵀ``. The counterpart of
    ``HardThreshold`` among low-rank methods: an *absolute* compressor: its error does not grow
    with the gradient, where a fixed rank has an error relative to it. One λ for the whole model;
    the rank of each matrix follows, and falls as gradients do.

    A tensor of shape (n, ...) is a matrix of n rows; one of one dimension, as a shard of
    ``TwoShot``, is folded into ⌊√d⌋ rows and padded with zeros. Where so many triplets would not be
    smaller than the tensor, it is sent as it is, and also where its norm is above 65,536·λ, so that
    float32's rounding would be seen. The decomposition takes ``O(n·m·min(n, m))`` time in every
    step, which is seconds on a host where the shorter side is thousands.

    Args:
        threshold: λ, in units of the (unscaled) gradient, above 0. Higher means more compression.
            With error feedback, as by default, what does not reach it adds up until it does.

    The number of triplets differs between workers and steps. An element takes ``32·k·(1/n + 1/m)``
    bits where k are sent.

    Example:
        >>> import torch
        >>> from lightning_gc import SVDThreshold
        >>> from lightning_gc.testing import Lockstep
        >>> given = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0, 0.0]))
        >>> Lockstep(1, SVDThreshold(2.0)).step([{"w": given}]).mean["w"].diag()
        tensor([4., 2., 0., 0., 0., 0.])

    Reference:
        The idea: Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021, which asks for absolute counterparts of low-rank methods. The form is ours.
    """

    threshold: float = 0.1
    limits = {"threshold": "[1e-37, 1e38] the least singular value that is sent"}

    traits = Traits(
        kind="low rank",
        portable=False,
        knob=Knob("threshold", low=1e-9, high=1e3, more="compression"),
        space=(Range("threshold", 1e-4, 1.0, scale="log"),),
    )
    waits = Waits(2)

    def smaller(self, shape: tuple[int, ...], triplets: int | None) -> bool:
        return triplets is None or triplets * sum(sides(shape)) < math.prod(shape)

    def kept(self, values: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        reached = values >= self.threshold
        # All, so that the tensor goes as it is.
        return reached | (values[0] > _LARGEST * self.threshold), torch.ones_like(values)

    def bound(self, numel: int) -> AbsoluteError:
        """Return v = λ·√⌊√numel⌋: no matrix has more singular values. And float32's rounding."""
        return AbsoluteError((1 + _ROUNDING) * self.threshold * math.sqrt(math.isqrt(numel)))

    @classmethod
    def examples(cls) -> tuple[SVDThreshold, ...]:
        return (cls(5.0), cls(1e-3), cls(1e3))
