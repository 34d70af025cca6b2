"""AtomoSVD: send singular triplets of a matrix, drawn at random so that it is unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.base import Variance, Waits
from lightning_gc.compressors.low_rank.factorisation import RANK, RANKS, sides
from lightning_gc.compressors.low_rank.singular_triplets import SingularTriplets
from lightning_gc.core import Bucket


@dataclass(frozen=True)
class AtomoSVD(SingularTriplets):
    """Keep each singular triplet with a probability, and make it larger in return.

    With ``M = Σ σ_i·u_i·v_iᵀ``: ``C = Σ_kept (σ_i/p_i)·u_i·v_iᵀ``, where triplet i is kept with
    probability ``p_i``, each by itself, so that ``E C = M``. Of all probabilities with the sum
    ``rank`` the variance ``Σ σ_i²·(1/p_i − 1)`` is least for ``p_i = min(1, σ_i/c)``: the greatest
    are always sent, and c follows from the sum. Each worker draws for itself.

    A tensor of shape (n, ...) is a matrix of n rows; one of one dimension, as a shard of
    ``TwoShot``, is folded into ⌊√d⌋ rows and padded with zeros. A tensor that ``rank`` triplets
    would not make smaller is sent as it is. Singular values below 1.2e-7 of the greatest, float32's
    rounding, count as zero. The decomposition takes ``O(n·m·min(n, m))`` time in every step, which
    is seconds on a host where the shorter side is thousands.

    Args:
        rank: how many triplets are sent on average, at least 1 (the paper's s). Higher means less
            compression, less variance.

    The number of triplets k differs between workers and steps: ``rank`` ± √rank. The vectors of the
    longer side are multiplied by σ/p. An element takes ``32·rank·(1/n + 1/m)`` bits on average:
    0.25 for 512 x 512 at rank 2. Where that is 32 or more, u is empty and v is the tensor.

    Example:
        >>> from lightning_gc import AtomoSVD
        >>> AtomoSVD(rank=2).bound(64 * 64)
        Variance(omega=31.0)

    Reference:
        Wang, Sievert, Liu, Charles, Papailiopoulos and Wright, "ATOMO: Communication-efficient
        Learning via Atomic Sparsification", NeurIPS 2018.
    """

    rank: int = 2
    limits = {"rank": RANKS}

    traits = replace(RANK, unbiased=True)
    waits = Waits(2)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether ``rank`` triplets are smaller than the tensor."""
        return self.rank * sum(sides(shape)) < math.prod(shape)

    def smaller(self, shape: tuple[int, ...], triplets: int | None) -> bool:
        return self.compresses(shape)

    def kept(self, values: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        p = probabilities(values, self.rank)
        draw = bucket.generator(shared=False)
        return torch.rand(p.shape, generator=draw, device=p.device, dtype=p.dtype) < p, p

    def bound(self, numel: int) -> Variance:
        """Return ω = ⌊√d⌋/rank − 1, or 0: no matrix of d elements has a shorter side above ⌊√d⌋.

        With equal probabilities, rank/n of n triplets, it is ``n/rank − 1``; the best make no more.
        """
        return Variance(max(0.0, math.isqrt(numel) / self.rank - 1))

    @classmethod
    def examples(cls) -> tuple[AtomoSVD, ...]:
        return (cls(1), cls(3), cls(64))


def probabilities(values: Tensor, budget: float) -> Tensor:
    """Return probabilities of sum ``budget`` (the paper's s), or less if few values are not zero.

    The paper removes one value after the other, and 1 from the budget, while ``budget·σ_i/Σσ`` over
    those that remain reaches 1. Here all steps are one. ``values``: ``(r,)``, r ≥ 1, descending.
    """
    order = torch.arange(len(values), device=values.device)
    tails = values.flip(0).cumsum(0).flip(0)  # Σ of this one and all behind it
    certain = (values * (budget - order) >= tails) & (values > 0)
    rest = tails.masked_fill(certain, 0).amax()
    shares = values / rest.where(rest > 0, 1.0) * (budget - certain.sum())
    return torch.where(certain, 1.0, shares)
