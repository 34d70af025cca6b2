"""Adjust the hard threshold so that a run sends a given share of all elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Decision, Needs, Observation, State
from .threshold_budget import MARGIN, NOTHING, Stretch, next_threshold
from .total_error import ThresholdController, sent_whole

_DECISIONS = 80  # per run; fewer find the threshold too late in short runs


@dataclass(frozen=True)
class TotalErrorBudget(ThresholdController):
    """Move λ of ``HardThreshold`` so that the density, averaged over the run, is ``budget``.

    The density is the paper's average density: elements that are sent, over *all* elements of the
    model. Uncompressed tensors count too. In all tests it is exceeded by less than 2 %. Once it is
    spent, only uncompressed tensors are sent.

    The paper proves that one constant λ has the least total error for a budget, of errors that are
    not fed back, and does not say how to find it. With error feedback, where gradients are noise
    around a slow mean, a λ proportional to ``√(s_t/γ_t)`` has less in units of the update, s_t
    being the scale of gradients and γ_t the learning rate: ``controllers/threshold_budget.py``
    derives it. So elements are spent while the learning rate is high. λ is found on the way, from
    the measured scale, the schedule of the rate, and what has been sent so far. The first step
    sends nothing, to measure the scale; λ changes after 1, 2, 4, … steps, then 80 times per run,
    and at the ends of epochs.

    Logs the total errors so far and the spent share of the budget.

    Args:
        budget: average density over the whole run, in (0, 1].
        initial: threshold of the first step, if it is to send something.

    Raises:
        ValueError: settings out of range, or a compressor without a threshold. At the first step: a
            run without an end, or a budget below the share of uncompressed elements.

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
    limits = {"budget": "(0, 1] a density", "initial": "(0, 1e30) a threshold"}

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(scale=True)

    def init(self) -> State:
        return {"level": None, "spent": 0.0, "over": 0.0, "past": []}

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
            new["level"] = self.initial or NOTHING
            new["over"] = over
            reason = "The threshold to begin with."
            return Decision(new["level"], reason=reason, figures=figures), new
        share, new["over"] = over - new["over"], over
        past = [Stretch(*row) for row in new["past"]]
        measured = share > 0 and math.isfinite(density)
        if measured:
            new["spent"] += density * share
            chosen, scale = max(density - whole, 0.0), observation.gradient_scale
            past.append(Stretch(new["level"], chosen, share, scale, observation.steps))
            new["past"] = [list(stretch) for stretch in past]
        figures["budget_spent"] = spent = new["spent"] / self.budget
        reason = f"{spent:.0%} of the budget is spent after {over:.0%} of the run."
        if measured and over < 1:
            planned = self.budget * (1 - MARGIN) - whole * (1 - over)  # this is sent in any case
            left = planned - new["spent"]
            new["level"] = next_threshold(past, left, over, observation.rates_ahead)
        else:
            reason = f"The threshold is kept. {reason}"
        return Decision(new["level"], reason=reason, figures=figures), new

    def _check_reach(self, whole: float) -> None:
        if whole >= self.budget:
            raise ValueError(
                f"{self!r}: {whole:.2%} of the elements are in uncompressed tensors, by "
                f"default 1-D ones and small ones, so no threshold keeps to this budget; compress "
                f"every tensor with PerParameter(HardThreshold()), or raise the budget."
            )
