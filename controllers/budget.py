"""How a threshold must move so that a whole run spends what it may, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_SLOPE = 2.0  # density ∝ λ^−2: a random walk's time to reach λ; a drift's has 1
_UP, _DOWN = 4.0, 1.25  # λ moves by these factors at most
_LEAST = 0.05  # of the budget's density, so that a run that has spent all still learns


class Stretch(NamedTuple):
    """A part of the run at one threshold."""

    threshold: float
    density: float
    share: float  # of the run


def next_threshold(recent: Sequence[Stretch], budget: float, spent: float, over: float) -> float:
    """Return the threshold to go on with.

    What is left, ``(budget − spent)/(1 − over)``, is the density wanted; c of ``density = c·λ^−2``
    is measured over as much of the past as is still to come, or the later half of the past where
    that is shorter. A lower λ also sends at once what has been waiting between the two thresholds,
    which looks as if density were steeper than it is. So λ falls in small steps only; it may
    rise fast, for what is sent cannot be taken back.

    Args:
        recent: from the oldest to the newest.
        budget: average density over the run.
        spent: density times share, added up so far.
        over: share of the run that is over, in (0, 1).
    """
    wanted = max((budget - spent) / (1 - over), _LEAST * budget)
    past = within(recent, over)
    sent = sum(stretch.density * stretch.share for stretch in past)
    now = recent[-1].threshold
    scale = sum((now / stretch.threshold) ** _SLOPE * stretch.share for stretch in past)
    ideal = now * math.pow(sent / scale / wanted, 1 / _SLOPE)
    return min(max(ideal, now / _DOWN), now * _UP)


def within(recent: Sequence[Stretch], over: float) -> list[Stretch]:
    """Return the latest stretches, as many as are looked at when ``over`` of the run is over."""
    window = min(over / 2, 1 - over)
    past: list[Stretch] = []
    for stretch in reversed(recent):
        past.insert(0, stretch)
        window -= stretch.share
        if window < 1e-9:  # shares are differences of what has been rounded
            break
    return past
