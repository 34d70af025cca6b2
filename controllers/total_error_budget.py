"""TotalErrorBudget: move the hard threshold so that a run sends a given share of all elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Decision, Observation, State
from .budget import Stretch, next_threshold, within
from .threshold_controller import ThresholdController, sent_whole
from .total_error import paper_threshold

_DECISIONS = 80  # per run; fewer find the threshold too late in short runs


@dataclass(frozen=True)
class TotalErrorBudget(ThresholdController):
    """Move λ of ``HardThreshold`` so that the density, averaged over the run, is ``budget``.

    The density is the paper's average density: of *all* elements of the model, those of tensors
    that are sent whole included. The paper does not say how to find the λ of a budget. Ours: spread
    the remaining budget over the remaining run, and move λ along ``density ∝ λ^−2`` towards that
    density. λ changes after 1, 2, 4, … steps, then 80 times per run, and at the ends of epochs. The
    run ends within 5 % of the budget if ``budget·steps`` is above about 2; below, each element is
    sent once or never.

    Logs the total errors so far and the spent share of the budget.

    Args:
        budget: average density over the whole run, in (0, 1].
        initial: threshold of the first step; default: the paper's rule at ``k_min = budget``. An
            error of a factor of 30 is soon corrected.

    Raises:
        ValueError: settings out of range; a compressor without a threshold; at the first step, a
            run without an end, or a budget below the share of elements that are sent whole.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, HardThreshold, PerParameter
        >>> from lightning_gc.controllers import TotalErrorBudget
        >>> every_tensor = PerParameter(HardThreshold())
        >>> strategy = CompressedDDPStrategy(every_tensor, controller=TotalErrorBudget(0.005))

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021: the communication budget of equations 3 and 5.
    """

    budget: float
    initial: float | None = None

    def __post_init__(self) -> None:
        self._check_density("budget", self.budget)
        if self.initial is not None and not 0 < self.initial < 1e30:
            raise ValueError(
                f"TotalErrorBudget(initial={self.initial!r}): a threshold is a number above 0."
            )

    def init(self) -> State:
        return {"level": None, "spent": 0.0, "over": 0.0, "recent": []}

    def turns(self, epoch: int) -> int:
        return _DECISIONS

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        new, over, density = dict(state), observation.progress, observation.density
        figures = {**self._figures(observation), "budget_spent": 0.0}
        if over is None:
            raise ValueError(
                f"{self!r} must know how long the run is; set Trainer(max_epochs=...) or max_steps."
            )
        whole = sent_whole(observation)
        if new["level"] is None:
            self._check_reach(whole)
            new["level"] = self.initial or paper_threshold(self.budget, observation.num_elements)
            new["over"] = over
            reason = "The threshold to begin with."
            return Decision(new["level"], reason=reason, figures=figures), new
        share, new["over"] = over - new["over"], over
        recent = [Stretch(*row) for row in new["recent"]]
        measured = share > 0 and math.isfinite(density)
        if measured:
            new["spent"] += density * share
            stretch = Stretch(new["level"], max(density - whole, 0.0), share)
            recent = within([*recent, stretch], over)
            new["recent"] = [list(stretch) for stretch in recent]
        figures["budget_spent"] = spent = new["spent"] / self.budget
        reason = f"{spent:.0%} of the budget is spent after {over:.0%} of the run."
        if measured and over < 1:
            reserved = whole * (1 - over)  # is sent whatever the threshold
            new["level"] = next_threshold(recent, self.budget, new["spent"] + reserved, over)
        else:
            reason = f"The threshold is kept. {reason}"
        return Decision(new["level"], reason=reason, figures=figures), new

    def _check_reach(self, whole: float) -> None:
        if whole >= self.budget:
            raise ValueError(
                f"{self!r}: {whole:.2%} of the elements are in tensors that are sent whole, by "
                f"default 1-D ones and small ones, so no threshold keeps to this budget; compress "
                f"every tensor with PerParameter(HardThreshold()), or raise the budget."
            )
