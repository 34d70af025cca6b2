"""EvenBudget: the rule that ``TotalErrorBudget`` had before, to be compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gc.controllers import Controller, Decision, Needs, Observation
from lightning_gc.controllers.base import State

_UP, _DOWN, _LEAST = 4.0, 1.25, 0.05


@dataclass(frozen=True)
class EvenBudget(Controller):
    """Spend a budget evenly: move λ so that density is what is left over what remains of the run.

    λ follows from ``density = c·λ^−2``, c measured over the later half of the finished run, at most
    as much as remains; it falls by 1.25 at most, and rises by 4.
    """

    budget: float

    @property
    def needs(self) -> Needs:
        """Total errors, to show them."""
        return Needs(errors=True)

    def turns(self, epoch: int) -> int:
        """Return as many as ``TotalErrorBudget``."""
        return 80

    def init(self) -> State:
        """Nothing is known."""
        return {"level": None, "spent": 0.0, "over": 0.0, "recent": []}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        """Count what was sent, and choose the next threshold."""
        new, over = dict(state), observation.progress or 0.0
        if new["level"] is None:
            new["level"] = 1 / (2 * math.sqrt(self.budget * observation.num_elements))
            return Decision(new["level"]), new
        share, new["over"] = over - new["over"], over
        new["spent"] += observation.density * share
        if share > 0 and over < 1:
            rows = [*new["recent"], [new["level"], observation.density, share]]
            new["recent"] = _within(rows, min(over / 2, 1 - over))
            new["level"] = self._next(new["recent"], new["spent"], over)
        return Decision(new["level"]), new

    def _next(self, recent: list[list[float]], spent: float, over: float) -> float:
        wanted = max((self.budget - spent) / (1 - over), _LEAST * self.budget)
        now = recent[-1][0]
        sent = sum(density * share for _, density, share in recent)
        scale = sum((now / level) ** 2 * share for level, _, share in recent)
        return min(max(now * math.sqrt(sent / scale / wanted), now / _DOWN), now * _UP)


def _within(rows: list[list[float]], window: float) -> list[list[float]]:
    """Return the latest rows, whose shares fill the window."""
    past: list[list[float]] = []
    for row in reversed(rows):
        past.insert(0, row)
        window -= row[2]
        if window < 1e-9:
            break
    return past
