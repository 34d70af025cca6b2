"""Curves whose squares are beyond floats are left out; the other parameters are decided on."""

from typing import Any

import pytest

from lightning_gc.controllers import (
    BytesBudget,
    Controller,
    Curve,
    GainSearch,
    LayerBudget,
    Observation,
    Point,
)

SOUND = Curve(9.0, (Point(1.0, 3.0, 100), Point(4.0, 2.9, 400)))
WIDE = [Curve(1e200, SOUND.points), Curve(9.0, (Point(1.0, 1e200, 100), SOUND.points[1]))]
BROKEN = [Curve(number, SOUND.points) for number in (float("inf"), float("nan"))]
CONTROLLERS = [
    LayerBudget(4.0, (1.0, 4.0)),
    LayerBudget(4.0, (1.0, 4.0), relative=True),
    BytesBudget(200.0, (1.0, 4.0), first=4.0),
    GainSearch((4.0, 1.0)),
]


def decide(controller: Controller, **curves: Any) -> Any:
    told = Observation(0, error_curves=curves, step_seconds=0.1)
    return controller.decide(told, controller.init())


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
@pytest.mark.parametrize("curve", WIDE + BROKEN, ids=repr)
def test_they_are_left_out(controller: Controller, curve: Curve) -> None:
    assert decide(controller, w=SOUND, v=curve) == decide(controller, w=SOUND)
    assert decide(controller, v=curve) == decide(controller)


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e153])
def test_the_gain_does_not_depend_on_the_unit(size: float) -> None:
    """Of many parameters, whose sum of squares is beyond floats at the largest size."""
    points = tuple(p._replace(error=p.error * size) for p in SOUND.points)
    curves = {f"p{i}": Curve(SOUND.norm * size, points) for i in range(9)}
    gain = decide(GainSearch((4.0, 1.0)), **curves)[0].figures["gain"]
    assert gain == pytest.approx((1 - (2.9 / 9) ** 2) ** 0.5)
