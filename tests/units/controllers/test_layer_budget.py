"""LayerBudget and BytesBudget: within their budgets, whatever the units or the order."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.controllers import BytesBudget, Curve, LayerBudget, Observation, Point
from lightning_gc.controllers.level_plan import totals
from tests.support.replay import patient, replay

LEVELS = (1.0, 2.0, 4.0, 8.0)


def curves(seed: int, layers: int = 5) -> dict[str, Curve]:
    """Of ranks: errors fall with the level at each layer's own pace, bytes grow with it."""
    draw, found = random.Random(seed), {}
    for number in range(layers):
        norm, decay, size = draw.uniform(1, 9), draw.uniform(0.05, 0.9), draw.uniform(100, 10_000)
        points = tuple(Point(c, norm * draw.uniform(0.9, 1) * 2.7 ** (-decay * c), size * c)
                       for c in LEVELS)  # fmt: skip
        found[f"p{number}"] = Curve(norm, points)
    return found


def seen(found: dict[str, Curve], epoch: int = 0) -> Observation:
    return Observation(epoch, error_curves=found)


def errors(found: dict[str, Curve], plan: Any, default: float) -> float:
    """Return the sum of squared errors, by hand."""
    return sum(
        point.error * point.error
        for name, curve in found.items()
        for point in curve.points
        if point.level == plan.get(name, default)
    )


@patient
@given(st.integers(0, 10**6), st.sampled_from(LEVELS), st.floats(0.3, 3), st.booleans())
def test_within_the_error_and_never_more_bytes(
    seed: int, reference: float, error: float, relative: bool
) -> None:
    budget, found = LayerBudget(reference, LEVELS, error, relative), curves(seed)
    decision, _ = budget.decide(seen(found), budget.init())
    plan, common = (totals(found, p, reference, relative) for p in (decision.levels, {}))
    finest = totals(found, {}, LEVELS[-1], relative)
    assert decision.level == reference
    assert plan.error <= max(error * common.error, finest.error) * (1 + 1e-9)
    if error >= 1:
        if not relative:
            budgeted = error * errors(found, {}, reference)
            assert errors(found, decision.levels, reference) <= budgeted * (1 + 1e-9)
        assert plan.nbytes <= common.nbytes
        assert decision.figures["bytes_saved"] >= 0


@patient
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_neither_units_nor_order_matter(seed: int, factor: float) -> None:
    budget, found = LayerBudget(4.0, LEVELS), curves(seed)
    first = budget.decide(seen(found), budget.init())[0].levels
    scaled = {
        n: Curve(c.norm * factor, tuple(p._replace(error=p.error * factor) for p in c.points))
        for n, c in found.items()
    }
    turned = dict(reversed(found.items()))
    for other in (scaled, turned):
        assert budget.decide(seen(other), budget.init())[0].levels == first


@patient
@given(st.integers(0, 10**6), st.floats(0.1, 2))
def test_never_over_the_bytes(seed: int, share: float) -> None:
    found = curves(seed)
    uniform = totals(found, {}, 4.0, False)
    budget = BytesBudget(share * uniform.nbytes, LEVELS, first=4.0)
    decision, _ = budget.decide(seen(found), budget.init())
    plan = totals(found, decision.levels, 4.0, False)
    fewest = totals(found, {}, LEVELS[0], False).nbytes
    if fewest > budget.bytes_per_step:
        assert plan.nbytes == pytest.approx(fewest)
        assert "raise bytes_per_step" in decision.warning
    else:
        assert plan.nbytes <= budget.bytes_per_step * (1 + 1e-9)
        assert not decision.warning
    if share >= 1:
        assert plan.error <= uniform.error * (1 + 1e-9)


@pytest.mark.parametrize(
    "budget", [LayerBudget(4.0, (4.0, 8.0), error=2.0), BytesBudget(1.0, (4.0, 8.0), first=4.0)]
)
def test_levels_of_others_are_not_taken(budget: LayerBudget | BytesBudget) -> None:
    """A chain draws curves at the levels of both its controllers."""
    found = curves(5)
    alone = {n: c._replace(points=c.points[2:]) for n, c in found.items()}
    decision, _ = budget.decide(seen(found), budget.init())
    assert decision == budget.decide(seen(alone), budget.init())[0]


def test_a_plan_over_its_budget_of_error_is_said() -> None:
    found = {"w": Curve(9.0, (Point(1, 3.0, 100), Point(4, 2.9, 400)))}
    budget = LayerBudget(4, (1, 4), error=0.1)
    decision, _ = budget.decide(seen(found), budget.init())
    assert (decision.level, decision.levels) == (4, {})
    assert "even the levels of least error" in decision.warning
    within = replace(budget, error=1.0)
    assert not within.decide(seen(found), within.init())[0].warning


def test_a_plan_stays_until_another_is_worth_it() -> None:
    budget, found = LayerBudget(4.0, LEVELS), curves(1)
    first, state = budget.decide(seen(found), budget.init())
    kept, state = budget.decide(seen(found, 1), state)
    assert kept.levels == first.levels
    assert "The plan stays" in kept.reason
    nothing, state = budget.decide(seen({}, 2), state)
    assert nothing.levels == first.levels
    # A plan that has come to exceed the budget goes, whatever it costs.
    steeper = {n: Curve(c.norm, tuple(p._replace(error=p.error * (50 if p.level < 4 else 1))
               for p in c.points)) for n, c in found.items()}  # fmt: skip
    last, _ = budget.decide(seen(steeper, 3), state)
    common = totals(steeper, {}, 4.0, False)
    assert totals(steeper, last.levels, 4.0, False).error <= common.error * (1 + 1e-9)


def test_what_is_not_finite_keeps_its_level() -> None:
    budget, found = LayerBudget(4.0, LEVELS), curves(2)
    first, state = budget.decide(seen(found), budget.init())
    (name, level), *_ = first.levels.items()
    broken = found | {name: found[name]._replace(norm=float("nan"))}
    again, _ = budget.decide(seen(broken, 1), state)
    assert again.levels[name] == level


def test_interval_and_first_epoch() -> None:
    budget, found = LayerBudget(4.0, LEVELS, interval=2), curves(3)
    told = [Observation(-1), seen(found), seen(found, 1), seen(curves(4), 2)]
    before, first, second, third = (d.levels for d in replay(budget, told))
    assert (before, first) == ({}, {})
    assert second
    assert third == second
    assert replay(replace(budget, interval=1), told)[1].levels == second


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: LayerBudget(5, (1, 2)), "must be one of levels"),
        (lambda: LayerBudget(1, (1,)), "two or more to choose from"),
        (lambda: LayerBudget(1, (1, 2), error=0), "a factor must be above 0"),
        (lambda: LayerBudget(1, (1, 2), interval=0), "epochs must be 1 or more"),
        (lambda: BytesBudget(0, (1, 2), first=1), "above 0; use 200_000"),
        (lambda: BytesBudget(9, (1, 2), first=3), "must be one of levels"),
        (lambda: BytesBudget(9, (1, 2), first=1, interval=0), "epochs must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(make, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()
