"""Try levels one by one, and keep the one with most throughput times gain (GainSearch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .bandwidth_aware import check_ladder, check_order
from .base import (
    Controller,
    Curve,
    Decision,
    KnobLike,
    Level,
    Needs,
    Observation,
    State,
)
from .level_plan import at, finite


@dataclass(frozen=True)
class GainSearch(Controller):
    """Search the level of the best ``gain / step seconds``, an epoch each.

    The gain of a level is ``‖C(x)‖/‖x‖`` over all parameters, from error curves of the gradients
    summed over an epoch, with ``‖C(x)‖² = ‖x‖² − ‖x − C(x)‖²`` as of a projection. It begins with
    the least compression; after each epoch the score of its level is known, and the next level is
    tried if its gain is at least ``gain``. The search ends when no level is left, when the next
    one's gain is too small, or when the scores of the two latest differ by less than ``omega``; the
    level of the best score is kept. If later its gain falls below ``gain``, the next of less
    compression is taken.

    Seconds differ between two runs, and so do levels; see ``BandwidthAware``.

    Args:
        levels: from least compression to most.
        gain: least gain, in (0, 1]; more compresses less.
        omega: relative difference of scores at which the search ends.
        trace: path of a file; empty for none.

    Raises:
        ValueError: settings out of range, levels in another order.

    Example:
        >>> from lightning_gc.controllers import GainSearch
        >>> search = GainSearch((0.1, 0.03, 0.01))
        >>> search.init()["level"]
        0

    Reference:
        Tyagi and Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL
        Training", CLOUD 2023. Our reading: with all levels, where its code never leaves the first
        step of its ladder, and each level's own gain.
    """

    levels: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003)
    gain: float = 0.75
    omega: float = 0.01
    trace: str = ""
    limits = {"gain": "(0, 1]", "omega": "[0, inf) the relative difference"}

    def __post_init__(self) -> None:
        check_ladder("GainSearch", self.levels)

    @property
    def needs(self) -> Needs:
        return Needs(curves=self.levels, seconds=True, trace=self.trace)

    def known_levels(self) -> tuple[Level, ...]:
        return self.levels

    def check(self, knob: KnobLike | None) -> None:
        super().check(knob)
        assert knob is not None
        check_order(self, self.levels, knob)

    def init(self) -> State:
        return {"level": 0, "scores": {}, "searching": True}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        now, scores, searching = state["level"], dict(state["scores"]), state["searching"]
        took = observation.step_seconds
        curves = finite(observation.error_curves, self.levels)
        gains = [_gain(curves, level) for level in self.levels]
        if not curves or not took > 0:
            reason = "No gains or seconds are known, so the level stays."
            return Decision(self.levels[now], reason=reason), state
        scores[str(now)] = gains[now] / took
        new, why = now, "the search is over"
        if searching:
            new, searching, why = self._next(now, gains, scores)
        elif gains[now] < self.gain and now > 0:
            new, why = now - 1, "its gain has fallen"
        figures = {"gain": gains[now], "score": scores[str(now)], "observed_step_seconds": took}
        reason = (
            f"Level {self.levels[now]:g} had a gain of {gains[now]:.3f} at {took:.4g} s a step: "
            f"{why}, so {self.levels[new]:g} is next."
        )
        decision = Decision(self.levels[new], {}, reason, figures)
        return decision, {"level": new, "scores": scores, "searching": searching}

    def _next(
        self, now: int, gains: list[float], scores: dict[str, float]
    ) -> tuple[int, bool, str]:
        """Return the next level, whether the search continues, and why."""
        before, score = scores.get(str(now - 1)), scores[str(now)]
        near = before is not None and abs(score - before) < self.omega * before
        if not near and now + 1 < len(self.levels) and gains[now + 1] >= self.gain:
            return now + 1, True, "the search continues"
        best = max(scores, key=lambda i: scores[i])
        return int(best), False, "the search ends with the best score"


def _gain(curves: Mapping[str, Curve], level: float) -> float:
    """Return ``‖C(x)‖/‖x‖`` of all parameters together; 1 for a gradient of zeros."""
    largest = max((curve.norm for curve in curves.values()), default=0.0)
    if not largest:
        return 1.0
    # In units of the largest norm: sums of finite squares may still be infinite.
    norms = [curve.norm / largest for curve in curves.values()]
    errors = [at(curve, level).error / largest for curve in curves.values()]
    whole = math.fsum(norm * norm for norm in norms)
    left = math.fsum(error * error for error in errors)
    return math.sqrt(max(1 - left / whole, 0.0))
