"""RedSync: find a threshold between the mean and the greatest magnitude by bisection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.sparsifiers import threshold_estimator
from lightning_gc.compressors.sparsifiers.threshold_estimator import ThresholdEstimator


@dataclass(frozen=True)
class RedSync(ThresholdEstimator):
    """Send elements beyond a threshold between mean and maximum, found by bisection.

    The threshold is ``mean + r·(max − mean)`` of magnitudes; r is bisected in 0..1 until k to 2·k
    elements reach it, or the interval is shorter than ``tolerance``. What is below the mean is
    never sent, so on heavy tails a large ``density`` is not reached.

    Args:
        density: wanted share of elements, in (0, 1]. Lower means more compression, more error.
        tolerance: length of the interval at which the search ends, above 0. Each halving is a pass
            over the tensor. The paper's code has 0.2: three passes, too few on heavy tails.

    Raises:
        ValueError: ``density`` outside (0, 1], a ``tolerance`` that is not above 0.

    Example:
        >>> from lightning_gc import RedSync
        >>> RedSync(0.01).knob.field
        'density'

    Reference:
        Fang, Fu, Yang and Hsieh, "RedSync: Reducing synchronization bandwidth for distributed deep
        learning training system", JPDC 2019.
    """

    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tolerance < 1:
            raise ValueError(
                f"RedSync(tolerance={self.tolerance!r}): it is the length of an interval within "
                f"0..1 and must be above 0; use 0.001."
            )

    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        mean = magnitudes.mean()
        low, high = 0.0, 1.0
        while True:
            r = (low + high) / 2
            threshold = mean + r * (1 - mean)  # the greatest magnitude is 1
            number = int(threshold_estimator.reached(magnitudes, threshold))
            enough = k <= number <= threshold_estimator.MOST * k
            if enough or (high - low) / 2 < self.tolerance:
                return threshold
            low, high = (low, r) if number < k else (r, high)
