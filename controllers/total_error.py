"""Set the hard threshold by the total-error paper's rule for a given Top-k (TotalError)."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass

from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, KnobLike, Needs, Observation, State


class ThresholdController(Controller):
    """Refuses compressors without a threshold, and logs the total errors."""

    @property
    def needs(self) -> Needs:
        return Needs(errors=True)

    def check(self, knob: KnobLike | None) -> None:
        what = "no level" if knob is None else f"a {knob.field}"
        judge("Controllers of a threshold", controller=self, knob=knob, what=what)

    def _figures(self, observation: Observation) -> dict[str, float]:
        return {
            "total_error": observation.total_error,
            "total_error_update": observation.total_error_update,
        }


def sent_whole(observation: Observation) -> float:
    """Return the share of elements in tensors that the compressor leaves alone."""
    d = observation.num_elements
    return 1 - observation.num_compressed / d if d else 0.0


def nothing_sent(observation: Observation) -> bool:
    """Return whether no element has reached the threshold since the last decision."""
    whole = observation.steps * (observation.num_elements - observation.num_compressed)
    return observation.steps > 0 and observation.sent_elements - whole < 0.5


@dataclass(frozen=True)
class TotalError(ThresholdController):
    """Set λ of ``HardThreshold`` once, to ``λ = 1 / (2·√(k_min·d))`` for d elements.

    With this λ the paper expects at least the accuracy of Top-k at density ``k_min``. The paper's
    longer formula is ``(2/√k)·√((2d/k + M)·ζ² + σ²)`` with ``k = k_min·d``, and this is the formula
    with its second root set to 1/4. λ does not depend on gradients. If gradients are much smaller,
    no element reaches λ, and the controller warns after the first epoch.

    What is proved of a constant λ: for a *fixed* sequence of tensors a_t, without error feedback,
    and any number of elements, there is one that leaves the least ``Σ‖a_t − C(a_t)‖²`` of all
    sparsifiers that send no more (Lemma 3). Under error feedback what is sent changes what is still
    to be sent: "minimizing the total-error is not possible" (§4.2), and how to choose λ "remains an
    open question" (§6).

    Logs the total errors so far, in units of the gradient and of the update.

    Args:
        k_min: density of the Top-k to compare with, in (0, 1].
        estimate_epochs: refused; use ``TotalErrorBudget``.
        budget: refused; use ``TotalErrorBudget``.
        initial: refused; use ``TotalErrorBudget``.

    Raises:
        ValueError: ``k_min`` out of range, a compressor without a threshold, a refused argument.

    Example:
        >>> from lightning_gc.controllers import Observation, TotalError
        >>> resnet18 = TotalError(k_min=0.001)
        >>> first = Observation(epoch=-1, num_elements=11_173_962)
        >>> f"{resnet18.decide(first, resnet18.init())[0].level:.2e}"
        '4.73e-03'

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021.
    """

    k_min: float = 0.001
    estimate_epochs: InitVar[int] = 0
    budget: InitVar[float | None] = None
    initial: InitVar[float | None] = None
    limits = {"k_min": "(0, 1] a density"}

    def __post_init__(
        self, estimate_epochs: int, budget: float | None, initial: float | None
    ) -> None:
        if budget is not None or initial is not None:
            raise ValueError(
                f"TotalError(budget={budget!r}, initial={initial!r}): a budget has a separate "
                f"class; use TotalErrorBudget(budget={budget!r}, initial={initial!r})."
            )
        if estimate_epochs:
            why = (
                "the estimated threshold is gone, since it had 2 to 5 times the total error of a "
                f"constant one; use TotalErrorBudget({self.k_min!r}), which sends that share of "
                "all elements"
            )
            refuse("TotalError", why, estimate_epochs=estimate_epochs)

    def init(self) -> State:
        return {"level": None}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        level, reason, warning = state["level"], "The threshold is kept.", ""
        if level is None:
            level = paper_threshold(self.k_min, observation.num_elements)
            reason = f"The paper's rule for {observation.num_elements:,} elements."
        elif observation.epoch == 0 and nothing_sent(observation):
            warning = (
                f"{self!r}: no element has reached the threshold {level:.3g} in the first epoch, "
                f"so only what goes uncompressed has been learned; gradients are too small for "
                f"this rule. Use TotalErrorBudget, or HardThreshold with a smaller threshold."
            )
        figures = self._figures(observation)
        return Decision(level, reason=reason, figures=figures, warning=warning), {"level": level}


def paper_threshold(k_min: float, num_elements: int) -> float:
    """Return ``1 / (2·√(k_min·d))``."""
    return 1 / (2 * math.sqrt(k_min * num_elements))
