"""Budget: adapt a threshold so that the density averaged over the run meets a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_SLOPE = 2.0  # density ∝ λ^−2: a random walk's time to reach λ; with a drift it is 1
_UP, _DOWN = 4.0, 1.25  # λ changes at most by these factors
_LEAST = 0.05  # of the budget's density, so that a run that has spent its budget still learns


class Stretch(NamedTuple):
    """A part of the run with one threshold."""

    threshold: float
    density: float
    share: float  # of the run


def next_threshold(recent: Sequence[Stretch], budget: float, spent: float, over: float) -> float:
    """Return the next threshold λ.

    The density wanted is ``(budget − spent)/(1 − over)``; c of ``density = c·λ^−2`` is measured
    over the latest stretches (``within``). Lowering λ also sends the errors between the old and the
    new threshold at once, so density seems steeper than it is. Hence λ falls in small steps only;
    it may rise fast, since sent elements cannot be taken back.

    Args:
        recent: from the oldest to the newest.
        budget: average density over the run.
        spent: sum of density times share so far.
        over: finished share of the run, in (0, 1).
    """
    wanted = max((budget - spent) / (1 - over), _LEAST * budget)
    past = within(recent, over)
    sent = sum(stretch.density * stretch.share for stretch in past)
    now = recent[-1].threshold
    scale = sum((now / stretch.threshold) ** _SLOPE * stretch.share for stretch in past)
    ideal = now * math.pow(sent / scale / wanted, 1 / _SLOPE)
    return min(max(ideal, now / _DOWN), now * _UP)


def within(recent: Sequence[Stretch], over: float) -> list[Stretch]:
    """Return the latest stretches: half the finished part, at most as much as remains."""
    window = min(over / 2, 1 - over)
    past: list[Stretch] = []
    for stretch in reversed(recent):
        past.insert(0, stretch)
        window -= stretch.share
        if window < 1e-9:  # shares are differences of rounded numbers
            break
    return past
