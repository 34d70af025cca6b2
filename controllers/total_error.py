"""TotalError: choose the hard threshold by formula, by measured gradient noise, or by a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Controller, Decision, KnobLike, Observation, State
from .budget import Stretch, next_threshold, within

_DECISIONS = 80  # per run with a budget; fewer find the threshold too late in short runs


@dataclass(frozen=True)
class TotalError(Controller):
    """Choose the threshold λ of ``HardThreshold``, which minimises the total error ``Σ_t‖e_t‖²``.

    Three ways to find λ:

    - ``TotalError(k_min=0.001)``: the paper's rule, constant: ``λ = 1 / (2·√(k_min·d))`` for d
      elements. It should do at least as well as Top-k at density ``k_min``.
    - ``TotalError(k_min=0.001, estimate_epochs=n)``: the same in the first n epochs, while noise
      and dissimilarity of the gradients are measured; then the paper's longer formula,
      ``λ = (2/√k)·√((2d/k + M̂)·ζ̂² + σ̂²)`` with ``k = k_min·d``. M̂ and σ̂² of the noise model
      ``E‖ξ‖² ≤ M̂·‖∇f_i‖² + σ̂²`` are a least-squares line through the epochs (M̂ = 0 with one);
      ζ̂² is the mean of ``‖∇f_i − ∇f‖²`` over workers and epochs.
    - ``TotalError(budget=b)``: adapts λ so that the density, averaged over the *whole run*, is b.
      The paper does not say how to find that λ. Ours: spread the remaining budget over the
      remaining run, and move λ along ``density ∝ λ^−2`` towards that density. λ changes after 1, 2,
      4, … steps, then 80 times per run, and at the ends of epochs. The run ends within 5 % of the
      budget if ``b·steps`` is above about 2; below, each element is sent once or never.

    Logs the total error so far and the spent share of the budget.

    Args:
        k_min: density of the Top-k to compare with, in (0, 1]; not with ``budget``.
        estimate_epochs: epochs in which to measure; 0 for the simple rule.
        budget: average density over the whole run, in (0, 1].
        initial: threshold of the first step with ``budget``; default: the paper's rule at ``k_min =
            budget``. An error of a factor of 30 is soon corrected.

    Raises:
        ValueError: settings out of range or in conflict; a compressor without a threshold; a budget
            in a run without an end.

    Example:
        >>> from lightning_gc.controllers import Observation, TotalError
        >>> resnet18 = Observation(epoch=-1, num_elements=11_173_962)
        >>> decision, _ = TotalError(k_min=0.001).decide(resnet18, {})
        >>> f"{decision.level:.2e}"
        '4.73e-03'

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021.
    """

    k_min: float | None = None
    estimate_epochs: int = 0
    budget: float | None = None
    initial: float | None = None

    errors = True

    def __post_init__(self) -> None:
        if (self.k_min is None) == (self.budget is None):
            raise ValueError(f"{self!r}: give either k_min, such as 0.001, or budget.")
        for name in ("k_min", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"TotalError({name}={value!r}): a density must be in (0, 1].")
        if self.estimate_epochs < 0 or (self.estimate_epochs and self.budget is not None):
            raise ValueError(
                f"TotalError(estimate_epochs={self.estimate_epochs!r}): 0 or more, with k_min only."
            )
        if self.initial is not None and not (self.budget is not None and 0 < self.initial < 1e30):
            raise ValueError(
                f"TotalError(initial={self.initial!r}): a threshold above 0, with budget only."
            )
        object.__setattr__(self, "moments", self.estimate_epochs > 0)

    def check(self, knob: KnobLike | None) -> None:
        if knob is None or knob.field != "threshold":
            what = "no level" if knob is None else f"a {knob.field}"
            raise ValueError(
                f"{self!r} chooses a threshold, but this compressor has {what}; use HardThreshold."
            )

    def init(self) -> State:
        return {"level": None, "moments": [], "spent": 0.0, "over": 0.0, "recent": []}

    def turns(self, epoch: int) -> int:
        return 0 if self.budget is None else _DECISIONS

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        new = {**self.init(), **state}
        if self.budget is not None:
            return self._spend(self.budget, observation, new)
        assert self.k_min is not None
        level, reason = new["level"], "The threshold is kept."
        numel = observation.num_elements
        if level is None:
            level = paper_threshold(self.k_min, numel)
            reason = f"The paper's rule for {numel:,} elements."
        if 0 <= observation.epoch < self.estimate_epochs:
            squared, noise = observation.gradient_squared, observation.gradient_noise
            seen = (squared, noise, observation.gradient_dissimilarity)
            new["moments"] = [*new["moments"], seen]
            if observation.epoch == self.estimate_epochs - 1:
                m, sigma2, zeta2 = estimates(new["moments"])
                level = estimated_threshold(self.k_min, numel, m, zeta2, sigma2)
                reason = f"Estimated: M = {m:.3g}, ζ² = {zeta2:.3g}, σ² = {sigma2:.3g}."
        new["level"] = level
        figures = {"total_error": observation.total_error}
        return Decision(level, reason=reason, figures=figures), new

    def _spend(self, budget: float, observation: Observation, new: State) -> tuple[Decision, State]:
        over, density = observation.progress, observation.density
        figures = {"total_error": observation.total_error, "budget_spent": 0.0}
        if over is None:
            raise ValueError(
                f"{self!r} must know how long the run is; set Trainer(max_epochs=...) or max_steps."
            )
        if new["level"] is None:
            new["level"] = self.initial or paper_threshold(budget, observation.num_elements)
            new["over"] = over
            return Decision(
                new["level"], reason="The threshold to begin with.", figures=figures
            ), new
        share, new["over"] = over - new["over"], over
        recent = [Stretch(*row) for row in new["recent"]]
        measured = share > 0 and math.isfinite(density)
        if measured:
            new["spent"] += density * share
            recent = within([*recent, Stretch(new["level"], density, share)], over)
            new["recent"] = [list(stretch) for stretch in recent]
        figures["budget_spent"] = spent = new["spent"] / budget
        reason = f"{spent:.0%} of the budget is spent after {over:.0%} of the run."
        if measured and over < 1:
            new["level"] = next_threshold(recent, budget, new["spent"], over)
        else:
            reason = f"The threshold is kept. {reason}"
        return Decision(new["level"], reason=reason, figures=figures), new


def paper_threshold(k_min: float, num_elements: int) -> float:
    """Return ``1 / (2·√(k_min·d))``."""
    return 1 / (2 * math.sqrt(k_min * num_elements))


def estimated_threshold(
    k_min: float, num_elements: int, m: float, zeta2: float, sigma2: float
) -> float:
    """Return ``(2/√k)·√((2d/k + M)·ζ² + σ²)`` with ``k = k_min·d``."""
    k = k_min * num_elements
    return 2 / math.sqrt(k) * math.sqrt((2 * num_elements / k + m) * zeta2 + sigma2)


def estimates(moments: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return (M̂, σ̂², ζ̂²) from one (‖∇f_i‖², noise, dissimilarity) per epoch.

    M̂ and σ̂² are slope and intercept of the least-squares line of noise over ``‖∇f_i‖²``, each at
    least 0; with one epoch, or equal epochs, all noise is σ̂².
    """
    count = len(moments)
    squared, noise, dissimilarity = (sum(column) / count for column in zip(*moments, strict=True))
    spread = sum((row[0] - squared) ** 2 for row in moments)
    slope = 0.0
    if spread > 0:
        slope = sum((row[0] - squared) * (row[1] - noise) for row in moments) / spread
    slope = min(max(slope, 0.0), noise / squared if squared > 0 else 0.0)
    return slope, noise - slope * squared, dissimilarity
