"""Compress less while gradient norms change fast (ACCORDION's critical regimes), else more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_gc.core.combinations import judge

from .base import Controller, Decision, KnobLike, Level, Needs, Observation, State, compresses_less

_SEVERAL = 3  # checks after which a warning says that nothing has been compressed


@dataclass(frozen=True)
class Accordion(Controller):
    """Detect critical regimes by the change of gradient norms over ``interval`` epochs.

    For each parameter, ``N(e) = ‖Σ_t g_t‖`` over the steps of epoch e, of worker 0's local, raw
    gradients. At the end of every ``interval``-th epoch, ``r = |N(e−interval) − N(e)| /
    N(e−interval)``. If ``r ≥ threshold`` the parameter is in a critical regime and gets level
    ``low`` until the next check, else ``high``. Epoch 0, the check after it, and a previous norm of
    0 count as critical. If the learning rate decays from the epoch that has ended to the next one,
    all parameters get ``low`` until the next check.

    This follows the authors' code: the paper does not say that gradients are summed as vectors, nor
    that the norms compared are ``interval`` epochs apart. But there *every* fall of the rate is a
    decay, so that under a cosine, linear or exponential schedule nothing is ever compressed. Their
    schedules and the total-error paper's fall tenfold at once; here a fall to half or less is a
    decay. A warning is given if three checks have compressed nothing, or if the run ends before the
    second check can change a level.

    Args:
        low: level of *low* compression, for critical regimes: density 0.1, 8 bits. None sends
            uncompressed.
        high: level of *high* compression: density 0.01, 4 bits.
        interval: epochs between checks; the authors use 10, and 5 for WikiText-2. Less for runs of
            ``interval + 1`` epochs or fewer, in which nothing would be compressed to ``high``.
        threshold: least relative change of a critical regime.
        granularity: ``"parameter"``, or ``"model"`` for one norm and one level for all.
        detector: ``"epoch"``, or ``"minibatch"`` for the variant to which the total-error paper
            compares: the norm of the first batch of every ``interval``-th epoch, epoch 0 included,
            ``r > threshold``, and a learning rate that decayed since the last check. Its levels
            hold from the second step of the epoch on; in their code from the first.
        decay: what counts as a decay of the learning rate: to ``1/decay`` or less. 1 counts every
            fall, as the authors do.

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
    decay: float = 2.0
    limits = {
        "interval": "[1, inf) the number of epochs",
        "threshold": "(0, inf] the threshold",
        "decay": "[1, inf] a factor",
    }

    @property
    def needs(self) -> Needs:
        return Needs(gradients="epoch sum" if self.detector == "epoch" else "first batch")

    def known_levels(self) -> tuple[Level, ...]:
        return self.low, self.high

    def check(self, knob: KnobLike | None) -> None:
        super().check(knob)
        assert knob is not None
        harder = not compresses_less(self.low, self.high, knob)
        judge("Accordion", controller=self, knob=knob, harder=harder)

    def init(self) -> State:
        return {
            "norms": {},
            "critical": {},
            "rate": None,
            "checked": None,  # the last epoch that has been
            "comparisons": 0,
            "compressed": False,  # a parameter has had the level ``high``
        }

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        new: State = {**self.init(), **state}
        # Norms observed within an epoch belong to its first batch.
        epoch = observation.epoch if observation.ended else observation.epoch + 1
        why, warning = "between checks", ""
        if observation.epoch < 0 and observation.ended:
            why, warning = "the first epoch is critical", self._too_short(observation.max_epochs)
        elif epoch % self.interval == 0 and epoch != new["checked"] and observation.gradient_norms:
            why = f"checked against epoch {epoch - self.interval}" if epoch else "the first check"
            self._check_norms(observation, epoch, new)
        decays = self._is_decay(observation.learning_rate, observation.next_learning_rate)
        if decays and self.detector == "epoch" and observation.ended and epoch >= 0:
            new["critical"] = dict.fromkeys(new["critical"], True)
            why = "the learning rate falls"
        new["compressed"] = new["compressed"] or not all(new["critical"].values())
        checked_now = new["comparisons"] > state.get("comparisons", 0)
        if checked_now and new["comparisons"] == _SEVERAL and not new["compressed"]:
            warning = (
                f"{self!r} has compressed nothing to the level {self.high!r} in {_SEVERAL} checks: "
                f"each time gradient norms had changed by {self.threshold:.0%} or more, or the "
                f"learning rate had fallen to 1/{self.decay:g} or less. Raise threshold or decay."
            )
        return self._decision(new["critical"], why, warning), new

    def _too_short(self, epochs: int | None) -> str:
        """Return a sentence if the run ends before a check can change a level."""
        more = 2 if self.detector == "epoch" else 1  # what the second check changes comes after it
        if epochs is None or epochs >= self.interval + more:
            return ""
        fix = f"use interval={epochs - more} or less, or" if epochs > more else "use"
        return (
            f"{self!r} compares epochs that are {self.interval} apart, so in a run of {epochs} "
            f"every level stays at {self.low!r}: {fix} {self.interval + more} epochs or more."
        )

    def _check_norms(self, observation: Observation, epoch: int, new: State) -> None:
        """Compare norms with the last check's; change ``new``, but not the values in it."""
        norms = dict(observation.gradient_norms)
        if self.granularity == "model":
            norms = {"": math.sqrt(sum(norm * norm for norm in norms.values()))}
        before, rate = new["norms"], observation.learning_rate
        decayed = new["rate"] is not None and self._is_decay(new["rate"], rate)
        new["critical"] = {
            n: self._is_critical(before.get(n), v, decayed) for n, v in norms.items()
        }
        new["comparisons"] += bool(before)
        new["norms"], new["rate"], new["checked"] = norms, rate, epoch

    def _is_decay(self, before: float, now: float) -> bool:
        return now < before and now * self.decay <= before * (1 + 1e-9)  # 0.1·0.1 is above 0.01

    def _is_critical(self, before: float | None, now: float, decayed: bool) -> bool:
        if not before or not math.isfinite(before) or not math.isfinite(now):
            return True
        change = abs(before - now) / before
        if self.detector == "minibatch":
            return decayed or change > self.threshold
        return change >= self.threshold

    def _decision(self, critical: Mapping[str, bool], why: str, warning: str) -> Decision:
        share = sum(critical.values()) / len(critical) if critical else 1.0
        reason = f"{share:.0%} of the parameters are in a critical regime ({why})."
        figures = {"critical_share": share}
        if self.granularity == "model" or not critical:
            level = self.low if all(critical.values()) else self.high
            return Decision(level, {}, reason, figures, warning)
        levels = {name: self.low if is_so else self.high for name, is_so in critical.items()}
        return Decision(self.low, levels, reason, figures, warning)
