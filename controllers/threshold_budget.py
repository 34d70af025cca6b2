"""Find the threshold that spends a budget of elements where they lower the total error most.

Under error feedback an element of the error wanders between −λ and λ until it is sent. Where
gradients are noise of scale s around a slow mean, a share of ``c·s²/λ²`` of the elements is sent in
a step (the time that a random walk takes to reach λ; c is about 1), and an element holds about
``λ²/6`` of squared error for any s. So ::

    minimise Σ γ_t²·λ_t²   subject to   Σ c·s_t²/λ_t² = K   gives   λ_t ∝ √(s_t/γ_t)

and densities proportional to ``s_t·γ_t``: elements are spent while gradients and learning rates are
large. A constant λ, which the paper's lemma has for errors that are not fed back, and a constant
density, which Top-k has, are as far from it, on either side.

Where it fails: a large gradient in the first steps is sent at a λ that was right for the small ones
before it, and may take a third of the budget; the formula is of errors that have reached λ, which
takes about 1/density steps from the start; and c rises where the mean of gradients is not small
against their noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

NOTHING = 1e30
"""A threshold that no gradient reaches: the highest of ``HardThreshold``'s knob."""

_UP = 4.0  # λ grows at most by this factor at a time
_FREE = 4  # stretches, of a step or two each, after which λ may change by any factor
_LEAST_RATE = 0.02  # of the highest to come: below it λ does not grow any more
MARGIN = 0.003
"""Share of a budget that is not planned with: what is sent in a stretch is known but afterwards."""

_LAST = 1.5  # stretches like the last one: where no more are to come, λ is not lowered
_TREND = 0.5  # share of the trend of s that is taken to go on
_FORGET = 1 / 8  # of the past: gradients of the first steps tell little of later ones
_PRIOR = 20.0  # steps that the belief in c = 1 weighs


class Stretch(NamedTuple):
    """A part of the run with one threshold.

    Attributes:
        threshold: λ.
        density: sent share of the elements.
        share: of the run.
        scale: root mean square of the elements of gradients, s.
        steps: their number.
    """

    threshold: float
    density: float
    share: float
    scale: float
    steps: int


def next_threshold(
    past: Sequence[Stretch], left: float, over: float, rates: Sequence[float] = ()
) -> float:
    """Return the next threshold λ.

    The density wanted now is the part of what is left that ``s_t·γ_t`` now is of its sum over the
    rest of the run: with known learning rates, and s that goes on half as it went so far. λ then
    follows from ``density = c·s²/λ²``.

    Args:
        past: all stretches, from the oldest to the newest; one at least.
        left: sum of density times share that may still be spent.
        over: finished share of the run, below 1.
        rates: learning rates in equal parts of the rest of the run; none, or all 0: they are taken
            as constant.
    """
    if left <= 0:
        return NOTHING
    before, steps = past[-1].threshold, past[-1].steps
    past = [stretch for stretch in past if 0 < stretch.scale < math.inf]
    if not past:
        return before
    scale, rest = recent_scale(past), 1 - over
    # Over the rest of the run s grows at most e-fold, and falls at most to e^−3.
    growth = min(max(_TREND * trend(past), -3 / rest), 1 / rest)
    rates = rates if any(rates) else [1.0] * 100
    floor, parts = _LEAST_RATE * max(rates), len(rates)
    weights = [
        max(rate, floor) * math.exp(growth * rest * (i + 0.5) / parts)
        for i, rate in enumerate(rates)
    ]
    wanted = left / rest * weights[0] * parts / sum(weights)
    walk = scale**2 * constant(past, over, left / rest)
    if len(past) <= _FREE:
        return min(math.sqrt(walk / wanted), NOTHING)
    # Lowering λ sends the errors above the new one at once: a part of (1 − λ'/λ)² of the elements,
    # as a random walk between −λ and λ is spread. So λ falls to where both make what is wanted.
    # Near the end it is not lowered at all: too few steps are left to send less again.
    low, high = before if rest < _LAST * past[-1].share else 0.0, before * _UP
    # 40 halvings leave less than float32 can distinguish.
    for _ in range(40):
        middle = (low + high) / 2
        sent = walk / middle**2 + max(0.0, 1 - middle / before) ** 2 / steps
        low, high = (middle, high) if sent > wanted else (low, middle)
    return min(high, NOTHING)


def recent_scale(past: Sequence[Stretch]) -> float:
    """Return s now: a moving geometric mean over about the last 20 steps.

    One gradient that is ten times as large does not predict the next ones. In a mean of
    squares it counts as a hundred steps, and keeps λ high while errors grow.
    """
    log, seen = 0.0, 0
    for stretch in past:
        seen += stretch.steps
        weight = max(stretch.steps / seen, 1 - 0.95**stretch.steps)
        log += (math.log(stretch.scale) - log) * weight
    return math.exp(log)


def trend(past: Sequence[Stretch]) -> float:
    """Return the slope of ``ln s`` over the run, by least squares; 0 of fewer than 4 stretches."""
    rows, over = [], 0.0
    finished = sum(stretch.share for stretch in past)
    for stretch in past:
        middle, over = over + stretch.share / 2, over + stretch.share
        if middle >= _FORGET * finished:
            rows.append((middle, math.log(stretch.scale), stretch.share))
    if len(rows) < 4:
        return 0.0
    whole = sum(share for *_, share in rows)
    x, y = (sum(row[i] * row[2] for row in rows) / whole for i in (0, 1))
    spread = sum(share * (at - x) ** 2 for at, _, share in rows)
    return sum(share * (at - x) * (log - y) for at, log, share in rows) / spread


def constant(past: Sequence[Stretch], over: float, density: float) -> float:
    """Return c of ``density = c·s²/λ²``, measured over the later half of the finished run.

    By ``s²/(s² + λ²)``, which is the same for small s: a step sends an element at most once,
    however large its gradient is.

    Args:
        past: all stretches.
        over: finished share of the run.
        density: mean density to come; what is known at first weighs 20 steps of it.
    """
    window, sent, walked = over / 2, _PRIOR * density, _PRIOR * density
    for stretch in reversed(past):
        sent += stretch.density * stretch.steps
        walked += stretch.steps / (1 + (stretch.threshold / stretch.scale) ** 2)
        window -= stretch.share
        if window < 1e-9:  # shares are differences of rounded numbers
            break
    return sent / walked
