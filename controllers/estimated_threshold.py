"""Set the hard threshold from measured noise and dissimilarity of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gc.core.refusal import refuse

from .base import Decision, Needs, Observation, State
from .threshold_controller import ThresholdController, nothing_sent
from .total_error import paper_threshold


@dataclass(frozen=True)
class EstimatedThreshold(ThresholdController):
    """Set λ of ``HardThreshold`` by the total-error paper's longer formula, once it is measured.

    ``λ = (2/√k)·√((2d/k + M)·ζ² + σ²)`` with ``k = k_min·d``: at this λ the compression term of the
    paper's bound for hard threshold (Theorem 6, ``2γ²L²·dλ²``) equals that for Top-k with k
    elements (Theorem 7). λ has the gradient's units. In the first epochs ``TotalError(k_min)``.

    **What to expect.** Both bounds are for the worst case, so λ is large. Under noise of scale s in
    every element (``σ² = d·s²``, ζ = 0), ``λ = 2s/√k_min``; an error that walks at random reaches
    that after ``(λ/s)² = 4/k_min`` steps on average. With ``k_min=0.001`` an element is sent every
    4,000 steps, a quarter as often as by Top-k, and hardly any in the first few hundred; any ζ > 0
    is multiplied by ``2/k_min`` and raises λ further. So it suits only runs of many times
    ``4/k_min`` steps; in others use ``TotalErrorBudget``. A warning is given if nothing is sent in
    the epoch after the estimate. If the estimates are 0 or not finite, a warning is given too, and
    the first epochs' threshold is kept.

    The paper does not say how to estimate M, σ² and ζ². Ours, from moments of each epoch:

    - of the noise model ``E‖ξ‖² ≤ M·‖∇f_i‖² + σ²`` a least-squares line through the epochs, with
      slope and intercept at least 0; M = 0 with one epoch. A mean where the model has a bound.
    - ζ², the mean of ``mean_i‖∇f_i − ∇f‖²``, at least 0. The model's ``C·‖∇f‖²`` counts as ζ².
    - Changes of ∇f_i within an epoch count as noise. Otherwise the moments are unbiased.

    Args:
        k_min: density of the Top-k to compare with, in (0, 1].
        epochs: in which to measure, at least 1; two or more to tell M from σ².

    Raises:
        ValueError: settings out of range; a compressor without a threshold.

    Example:
        >>> from lightning_gc.controllers import EstimatedThreshold
        >>> EstimatedThreshold(k_min=0.01, epochs=3).needs.moments
        True

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021, section 6, "How to tune the hard-threshold?".
    """

    k_min: float = 0.001
    epochs: int = 2

    def __post_init__(self) -> None:
        self._check_density("k_min", self.k_min)
        if self.epochs < 1 or self.epochs != int(self.epochs):
            refuse("EstimatedThreshold", "1 or more", epochs=self.epochs)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(moments=True)

    def init(self) -> State:
        return {"level": None, "moments": []}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        level, moments = state["level"], state["moments"]
        reason, warning = "The threshold is kept.", ""
        if level is None:
            level = paper_threshold(self.k_min, observation.num_elements)
            reason = f"The paper's rule for {observation.num_elements:,} elements."
        if 0 <= observation.epoch < self.epochs:
            squared, noise = observation.gradient_squared, observation.gradient_noise
            moments = [*moments, (squared, noise, observation.gradient_dissimilarity)]
            if observation.epoch == self.epochs - 1:
                m, sigma2, zeta2 = estimates(moments)
                found = estimated_threshold(self.k_min, observation.num_elements, m, zeta2, sigma2)
                shown = f"M = {m:.3g}, ζ² = {zeta2:.3g}, σ² = {sigma2:.3g}"
                if 0 < found < math.inf:
                    level, reason = found, f"Estimated: {shown}."
                else:
                    warning = (
                        f"{self!r}: the threshold {level:.3g} is kept, since the noise measured in "
                        f"the first epochs, {shown}, gives none. Too few steps were measured, or "
                        f"gradients are not finite; measure more epochs, or use TotalErrorBudget."
                    )
        elif observation.epoch == self.epochs and nothing_sent(observation):
            warning = (
                f"{self!r}: no element has reached the threshold {level:.3g} in the "
                f"{observation.steps} steps since it was estimated. Noise alone takes an "
                f"element there in {4 / self.k_min:,.0f} steps on average; in a shorter run use "
                f"TotalErrorBudget, or TotalError."
            )
        new = {"level": level, "moments": moments}
        figures = self._figures(observation)
        return Decision(level, reason=reason, figures=figures, warning=warning), new


def estimated_threshold(
    k_min: float, num_elements: int, m: float, zeta2: float, sigma2: float
) -> float:
    """Return ``(2/√k)·√((2d/k + M)·ζ² + σ²)`` with ``k = k_min·d``."""
    k = k_min * num_elements
    return 2 / math.sqrt(k) * math.sqrt((2 * num_elements / k + m) * zeta2 + sigma2)


def estimates(moments: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return (M̂, σ̂², ζ̂²) from one (‖∇f_i‖², noise, dissimilarity) per epoch.

    M̂ and σ̂² are slope and intercept of the least-squares line of noise over ``‖∇f_i‖²``, each at
    least 0; with one epoch, or equal epochs, all noise is σ̂². Unbiased moments may be below 0:
    epochs are averaged first, since a floor of 0 for each would add a bias.
    """
    count = len(moments)
    squared, noise, dissimilarity = (sum(column) / count for column in zip(*moments, strict=True))
    noise = max(noise, 0.0)
    spread = sum((row[0] - squared) ** 2 for row in moments)
    slope = 0.0
    if spread > 0:
        slope = sum((row[0] - squared) * (row[1] - noise) for row in moments) / spread
    slope = min(max(slope, 0.0), noise / squared if squared > 0 else 0.0)
    return slope, noise - slope * squared, max(dissimilarity, 0.0)
