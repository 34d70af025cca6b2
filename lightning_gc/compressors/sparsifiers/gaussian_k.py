"""GaussianK: threshold sparsification that assumes normally distributed elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.sparsifiers.topk_selection import ThresholdEstimator, reached

_CORRECTIONS = 3


@dataclass(frozen=True)
class GaussianK(ThresholdEstimator):
    """Send elements beyond the quantile of a normal distribution with the tensor's own spread.

    The threshold is ``√(mean x²)·Φ⁻¹(1 − density/2)``. While fewer than two thirds of the wanted
    number reach it, it is halved, and while more than four thirds do, multiplied by 1.5: three
    times at most. Gradients have heavier tails than a normal distribution; hence the corrections.

    Args:
        density: wanted share of elements, in (0, 1]. Lower means more compression, more error.

    Example:
        >>> from lightning_gc import GaussianK
        >>> GaussianK(0.01).at(0.1)
        GaussianK(density=0.1)

    Reference:
        Shi, Chu, Cheung and See, "Understanding Top-k Sparsification in Distributed Deep
        Learning", 2019. The tensor's mean, which the paper adds, is taken as zero.
    """

    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        wanted, spread = k / magnitudes.numel(), magnitudes.square().mean().sqrt()
        # Filled on the device: a number from the host would have to be copied there.
        below = torch.full((), 1 - wanted / 2, dtype=torch.float64, device=spread.device)
        threshold: Tensor = spread * torch.special.ndtri(below)
        for _ in range(_CORRECTIONS):
            share = reached(magnitudes, threshold) / k
            # The paper's correction: halve, or raise by half, if the share is off by a third.
            threshold *= torch.where(share < 2 / 3, 0.5, torch.where(share > 4 / 3, 1.5, 1.0))
        return threshold
