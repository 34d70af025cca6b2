"""RedSync: find a threshold between the mean and the greatest magnitude by bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Waits
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.topk_selection import ThresholdEstimator
from lightning_gc.core import payload_validation

_AT_ONCE = 3  # halvings beside the host, for one wait


@dataclass(frozen=True)
class RedSync(ThresholdEstimator):
    """Send elements beyond a threshold between mean and maximum, found by bisection.

    The threshold is ``mean + r·(max − mean)`` of magnitudes; r is bisected in 0..1 until k to 2·k
    elements reach it, or the interval is shorter than ``tolerance``. Elements below the mean are
    never sent, so on heavy tails a large ``density`` is not reached.

    Args:
        density: wanted share of elements, in (0, 1]. Lower means more compression, more error.
        tolerance: length of the interval at which the search ends, above 0. Each halving is a pass
            over the tensor. The paper's code has 0.2: three passes, too few on heavy tails.

    Example:
        >>> from lightning_gc import RedSync
        >>> RedSync(0.01).knob.field
        'density'

    Reference:
        Fang, Fu, Yang and Hsieh, "RedSync: Reducing synchronization bandwidth for distributed deep
        learning training system", JPDC 2019.
    """

    tolerance: float = 1e-3
    limits = {"tolerance": "(0, 1) the length of an interval"}

    @property
    def waits(self) -> Waits:
        halvings = math.floor(math.log2(1 / self.tolerance)) + 1
        return Waits(1, 1 - (-halvings // _AT_ONCE))

    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        mean = magnitudes.mean()
        low, high = 0.0, 1.0
        counted: dict[float, int] = {}  # how many reach the threshold of r
        while True:
            r = (low + high) / 2
            if r not in counted:
                counted |= self._count(magnitudes, mean, low, high)
            enough = k <= counted[r] <= topk_selection.MOST * k
            if enough or (high - low) / 2 < self.tolerance:
                return _at(r, mean)
            low, high = (low, r) if counted[r] < k else (r, high)

    def _count(self, magnitudes: Tensor, mean: Tensor, low: float, high: float) -> dict[float, int]:
        """Return r -> number for the middle; beside the host, which waits, for later ones too."""
        parts = 2 if payload_validation.on_host(magnitudes) else 2**_AT_ONCE
        middles = [low + (high - low) * i / parts for i in range(1, parts)]
        numbers = [topk_selection.reached(magnitudes, _at(r, mean)) for r in middles]
        return dict(zip(middles, torch.stack(numbers).tolist(), strict=True))


def _at(r: float, mean: Tensor) -> Tensor:
    """Return the threshold at r from the mean to the greatest magnitude, which is 1."""
    return mean + r * (1 - mean)
