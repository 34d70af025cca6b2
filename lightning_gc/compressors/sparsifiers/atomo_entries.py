"""AtomoEntries: send about k elements, drawn by their magnitudes so that the result is unbiased."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightning_gc.compressors.base import Variance
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.compressors.sparsifiers.variance_sparsifier import (
    MagnitudeSampling,
    MagnitudeSums,
    VarianceSparsifier,
)


@dataclass(frozen=True)
class AtomoEntries(DensitySparsifier, MagnitudeSampling):
    """Send elements with probabilities proportional to their magnitudes, k of them on average.

    ``C(x)_i = x_i/p_i`` with probability ``p_i = min(1, |x_i|/c)``, else 0, so ``E C(x) = x``:
    ATOMO with single elements for atoms, where ``AtomoSVD`` has singular triplets. Of all
    probabilities with the sum k = density·numel, these make the variance ``Σ x_i²·(1/p_i − 1)``
    least, and c follows from the sum. It is the form of ``VarianceSparsifier``, which fixes the
    variance instead, and sends as few elements as it can.

    Args:
        density: share of elements sent on average, in (0, 1]; k is at least one. Lower means more
            compression, more variance.

    How many are sent differs between workers and steps: k ± √k. An element sent by chance has no
    value to send: where they are one in a hundred it takes 9.6 bits.

    Example:
        >>> from lightning_gc import AtomoEntries
        >>> AtomoEntries(0.25).bound(1000)
        Variance(omega=3.0)

    Reference:
        Wang, Sievert, Liu, Charles, Papailiopoulos and Wright, "ATOMO: Communication-efficient
        Learning via Atomic Sparsification", NeurIPS 2018.
    """

    traits = replace(DensitySparsifier.traits, unbiased=True)
    waits = VarianceSparsifier.waits

    def least(self, every: MagnitudeSums, reaching: MagnitudeSums) -> Tensor:
        assert isinstance(every.number, int)
        budget = every.magnitudes.new_full((), self.count(every.number)) - reaching.number
        rest = every.magnitudes - reaching.magnitudes
        return (rest / budget.where(budget > 0, 1.0)).clamp_min(0)

    def bound(self, numel: int) -> Variance:
        """Return ω = numel/k − 1, reached when all magnitudes are equal; the best make no more."""
        return Variance(max(1, numel) / max(1, self.count(numel)) - 1)
