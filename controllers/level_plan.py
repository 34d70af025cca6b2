"""Compute a level plan's error and bytes from error curves, and decide on its replacement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gc.core.refusal import refuse

from .base import Controller, Curve, Level, Point


class PlanCost(NamedTuple):
    """A plan's error and bytes, by the curves.

    Attributes:
        error: ``Σ ‖x − C(x)‖²`` over parameters, or of relative errors.
        nbytes: of one worker's messages.
    """

    error: float
    nbytes: float


def finite(curves: Mapping[str, Curve], levels: Sequence[float]) -> dict[str, Curve]:
    """Return the curves with finite squares, at these levels; other parameters keep their levels.

    Curves have more points where another controller needs them too.
    """
    # Products, for **2 raises OverflowError where they are infinite.
    own = {
        name: Curve(curve.norm, tuple(dict.fromkeys(at(curve, level) for level in levels)))
        for name, curve in curves.items()
    }
    return {
        name: curve
        for name, curve in own.items()
        if math.isfinite(curve.norm * curve.norm)
        and all(math.isfinite(p.error * p.error) and math.isfinite(p.nbytes) for p in curve.points)
    }


def squared(curve: Curve, point: Point, relative: bool) -> float:
    """Return a point's squared error, in units of ``‖x‖²`` if relative; 0 for a zero gradient."""
    if not relative:
        return point.error * point.error
    share = point.error / curve.norm if curve.norm else 0.0
    return share * share


def at(curve: Curve, level: float) -> Point:
    """Return a curve's point at a level; the nearest one where the knob was clamped."""
    return min(curve.points, key=lambda point: abs(point.level - level))


def totals(
    curves: Mapping[str, Curve], plan: Mapping[str, Level], default: float, relative: bool
) -> PlanCost:
    """Return error and bytes of a plan; parameters that are not in it have the default."""
    error = nbytes = 0.0
    for name, curve in curves.items():
        level = plan.get(name, default)
        point = at(curve, default if level is None else level)
        error += squared(curve, point, relative)
        nbytes += point.nbytes
    return PlanCost(error, nbytes)


def replaced(
    plan: Mapping[str, Level], curves: Mapping[str, Curve], chosen: Sequence[int], default: float
) -> dict[str, Level]:
    """Return a plan in which each curve's parameter has the level of its chosen point.

    Parameters at the default level are not listed; those without a curve keep their levels.
    """
    new = {
        name: curve.points[i].level for (name, curve), i in zip(curves.items(), chosen, strict=True)
    }
    others = {name: level for name, level in plan.items() if name not in new}
    return others | {name: level for name, level in new.items() if level != default}


def check_settings(
    controller: Controller, levels: Sequence[float], name: str, level: float
) -> None:
    """Raise ValueError for invalid or too few levels, or one that is not theirs."""
    for each in levels:
        controller._check_level(each)
    owner = type(controller).__name__
    if None in levels:
        refuse(owner, "give numbers, None has no curve", levels=levels)
    if len(set(levels)) < 2:
        refuse(owner, "give two or more to choose from", levels=levels)
    if level not in levels:
        raise ValueError(f"{owner}({name}={level!r}): it must be one of levels={levels!r}.")
