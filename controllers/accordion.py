"""Accordion: compress less while gradient norms change fast (critical regimes), else more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .base import Controller, Decision, KnobLike, Level, Observation, State, compresses_less


@dataclass(frozen=True)
class Accordion(Controller):
    """Detect critical regimes by the change of gradient norms over ``interval`` epochs.

    For each parameter, ``N(e) = ‖Σ_t g_t‖`` over the steps of epoch e, of worker 0's local, raw
    gradients. At the end of every ``interval``-th epoch, ``r = |N(e−interval) − N(e)| /
    N(e−interval)``. If ``r ≥ threshold`` the parameter is in a critical regime and gets level
    ``low`` until the next check, else ``high``. Epoch 0, the check after it, and a previous norm of
    0 count as critical. If the next epoch's learning rate is lower than that of the one that has
    ended, all parameters get ``low`` until the next check.

    This follows the authors' code: the paper does not say that gradients are summed as vectors, nor
    that the norms compared are ``interval`` epochs apart.

    Args:
        low: level of *low* compression, for critical regimes: density 0.1, 8 bits. None sends
            uncompressed.
        high: level of *high* compression: density 0.01, 4 bits.
        interval: epochs between checks; the authors use 10, and 5 for WikiText-2.
        threshold: least relative change of a critical regime.
        granularity: ``"parameter"``, or ``"model"`` for one norm and one level for all.
        detector: ``"epoch"``, or ``"minibatch"`` for the variant to which the total-error paper
            compares: the norm of the first batch of every ``interval``-th epoch, ``r >
            threshold``, and a learning rate that fell since the last check.

    Raises:
        ValueError: settings out of range; with a compressor for which ``low`` compresses more than
            ``high``.

    Example:
        >>> from lightning_gc.controllers import Accordion, Observation
        >>> accordion = Accordion(low=0.1, high=0.01, interval=1)
        >>> _, state = accordion.decide(Observation(0, gradient_norms={"w": 4.0}), accordion.init())
        >>> decision, _ = accordion.decide(Observation(1, gradient_norms={"w": 3.0}), state)
        >>> decision.levels
        {'w': 0.01}

    Reference:
        Agarwal et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime
        Identification", MLSys 2021.
    """

    low: Level
    high: Level
    interval: int = 10
    threshold: float = 0.5
    granularity: Literal["parameter", "model"] = "parameter"
    detector: Literal["epoch", "minibatch"] = "epoch"

    def __post_init__(self) -> None:
        self._check_level(self.low)
        self._check_level(self.high)
        if self.interval < 1 or self.interval != int(self.interval):
            raise ValueError(f"Accordion(interval={self.interval!r}): whole epochs, 1 or more.")
        if not self.threshold > 0:
            raise ValueError(f"Accordion(threshold={self.threshold!r}): above 0, such as 0.5.")
        if self.granularity not in ("parameter", "model"):
            raise ValueError(
                f"Accordion(granularity={self.granularity!r}): use 'parameter' or 'model'."
            )
        if self.detector not in ("epoch", "minibatch"):
            raise ValueError(f"Accordion(detector={self.detector!r}): use 'epoch' or 'minibatch'.")

    @property
    def gradients(self) -> Literal["none", "epoch sum", "first batch"]:  # type: ignore[override]
        return "epoch sum" if self.detector == "epoch" else "first batch"

    def check(self, knob: KnobLike | None) -> None:
        super().check(knob)
        assert knob is not None
        if not compresses_less(self.low, self.high, knob):
            raise ValueError(
                f"{self!r}: low={self.low!r} compresses harder than high={self.high!r}, as a "
                f"higher {knob.field} means more {knob.more}; swap the two."
            )

    def init(self) -> State:
        return {"norms": {}, "critical": {}, "rate": None}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        epoch = observation.epoch
        norms, critical, rate = state["norms"], state["critical"], state["rate"]
        why = "between checks"
        if epoch < 0:
            why = "the first epoch is critical"
        elif epoch % self.interval == 0:
            now = dict(observation.gradient_norms)
            if self.granularity == "model":
                now = {"": math.sqrt(sum(norm * norm for norm in now.values()))}
            fell = rate is not None and observation.learning_rate < rate
            critical = {n: self._is_critical(norms.get(n), v, fell) for n, v in now.items()}
            norms, rate = now, observation.learning_rate
            why = f"checked against epoch {epoch - self.interval}" if epoch else "the first check"
        falls = observation.next_learning_rate < observation.learning_rate
        if falls and self.detector == "epoch" and epoch >= 0:
            critical = dict.fromkeys(critical, True)
            why = "the learning rate falls"
        return self._decision(critical, why), {"norms": norms, "critical": critical, "rate": rate}

    def _is_critical(self, before: float | None, now: float, rate_fell: bool) -> bool:
        if not before or not math.isfinite(before) or not math.isfinite(now):
            return True
        change = abs(before - now) / before
        if self.detector == "minibatch":
            return rate_fell or change > self.threshold
        return change >= self.threshold

    def _decision(self, critical: Mapping[str, bool], why: str) -> Decision:
        share = sum(critical.values()) / len(critical) if critical else 1.0
        reason = f"{share:.0%} of the parameters are in a critical regime ({why})."
        figures = {"critical_share": share}
        if self.granularity == "model" or not critical:
            level = self.low if all(critical.values()) else self.high
            return Decision(level, reason=reason, figures=figures)
        levels = {name: self.low if is_so else self.high for name, is_so in critical.items()}
        return Decision(self.low, levels, reason, figures)
