"""TotalErrorBudget spends its budget, however error depends on the threshold."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import HardThreshold
from lightning_gc.controllers import Observation, TotalErrorBudget
from lightning_gc.testing import Lockstep
from tests.support.replay import levels, replay

RESNET18 = 11_173_962
BUDGET = 0.01
DRIFTS: dict[str, Callable[[float], float]] = {  # of the share of the run that is over
    "none": lambda t: 1.0,
    "rises": lambda t: 10 ** (t - 1),
    "falls": lambda t: 10**-t,
    "warm-up and steps": lambda t: min(1.0, 0.2 + 8 * t) * 0.3 ** (t > 0.6) * 0.5 ** (t > 0.85),
    "high at first": lambda t: 10 * math.exp(-60 * t) + 1,
    "swings": lambda t: 1 + 0.5 * math.sin(2 * math.pi * t),
}
SLOPES = (1.0, 1.5, 2.0, 2.5)


def turns(steps: int, epochs: int, per_run: int = 80) -> list[int]:
    """Steps before which there is a turn, written slowly: doubling, regular, ends of epochs."""
    pause, last, found = max(steps // per_run, 1), 0, []
    for step in range(1, steps + 1):
        if step % (steps // epochs) == 0 or step - last >= max(min(last, pause), 1):
            found.append(step)
            last = step
    return found


def spend(
    law: Callable[[float, int, int], float], steps: int, epochs: int, controller: TotalErrorBudget
) -> float:
    """Return spent over budget; ``law`` is asked for the density from one step to another."""
    assert controller.turns(0) == 80
    first = Observation(-1, progress=0.0, num_elements=10_000, num_compressed=10_000)
    decision, state = controller.decide(first, controller.init())
    spent, last = 0.0, 0
    for step in turns(steps, epochs):
        assert decision.level is not None
        density = law(decision.level, last, step)
        spent += density * (step - last)
        last, whole = step, step * epochs // steps
        now = replace(first, epoch=whole - 1, progress=step / steps, steps=1)
        now = replace(now, sent_elements=density * 10_000, ended=step % (steps // epochs) == 0)
        decision, state = controller.decide(now, state)
        share = decision.figures["budget_spent"]
        assert share == pytest.approx(spent / steps / controller.budget)
    return spent / steps / controller.budget


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("drift", DRIFTS)
def test_budget_under_laws_made_up(slope: float, drift: str) -> None:
    """density = c·λ^−slope with a drifting c and noise, whatever the first threshold.

    A drift of gradients has slope 1, a random walk 2; a flatter law would be steered too timidly.
    """
    for off in (1 / 30, 1.0, 30.0):
        rng = random.Random(0)

        def law(threshold: float, start: int, stop: int, off: float = off, rng: Any = rng) -> float:
            c = DRIFTS[drift](start / 600) * math.exp(0.1 * rng.gauss(0, 1))
            return min(1.0, BUDGET * c * (threshold * off) ** -slope)

        spent = spend(law, 600, 6, TotalErrorBudget(BUDGET, initial=1.0))
        assert spent == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("ratio", [0.05, 0.5])  # of the gradient's mean to its noise
@pytest.mark.parametrize("drift", DRIFTS)
def test_budget_under_error_feedback(drift: str, ratio: float) -> None:
    """What is not sent waits, and a lower threshold lets it out at once. In NumPy, heavy tails."""
    for steps, epochs, off in ((400, 1, 1.0), (400, 20, 30.0), (600, 3, 1 / 30)):
        rng = np.random.default_rng(0)
        scale = np.exp(rng.standard_normal(1000))
        mean = ratio * scale * rng.standard_normal(1000)
        error = np.zeros(1000)

        def law(
            threshold: float, start: int, stop: int, error: Any = error, steps: int = steps
        ) -> float:
            sent = 0
            for step in range(start, stop):
                noise = scale * rng.standard_normal(1000)  # noqa: B023
                error += DRIFTS[drift](step / steps) * (mean + noise)  # noqa: B023
                above = np.abs(error) >= threshold
                sent += int(above.sum())
                error[above] = 0
            return sent / 1000 / (stop - start)

        spent = spend(law, steps, epochs, TotalErrorBudget(BUDGET, initial=20 * off))
        assert spent == pytest.approx(1, abs=0.05), (steps, epochs, off)


def test_budget_of_the_librarys_own_error_feedback() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(2000, generator=generator).exp()
    alone = Lockstep(1, HardThreshold(15.0))
    (engine,) = alone.engines

    def law(threshold: float, start: int, stop: int) -> float:
        engine.set_levels(threshold)
        before = engine.statistics.tally.sent
        for _ in range(start, stop):
            alone.step([{"w": scale * torch.randn(2000, generator=generator)}])
        return (engine.statistics.tally.sent - before) / ((stop - start) * 2000)

    spent = spend(law, 400, 4, TotalErrorBudget(BUDGET, initial=15.0))
    assert spent == pytest.approx(1, abs=0.05)


def test_the_threshold_settles_where_density_does() -> None:
    """For a budget there is one optimal constant threshold: at the end it hardly moves."""
    seen: list[float] = []

    def law(threshold: float, start: int, stop: int) -> float:
        seen.append(threshold)
        return min(1.0, BUDGET / threshold**1.5)

    spend(law, 2000, 10, TotalErrorBudget(BUDGET, initial=5.0))
    half = seen[len(seen) // 2 :]
    assert max(half) / min(half) < 1.1
    assert half[-1] == pytest.approx(1, rel=0.1)


def test_the_first_threshold_is_the_papers_unless_given() -> None:
    seen = [Observation(-1, num_elements=RESNET18, num_compressed=RESNET18, progress=0.0)]
    assert levels(TotalErrorBudget(0.001), seen) == [pytest.approx(0.004730057383)]
    assert levels(TotalErrorBudget(0.001, initial=0.3), seen) == [0.3]


def budget_run(*rows: tuple[float, float]) -> list[Observation]:
    """Turns of (progress, density)."""
    first = Observation(0, num_elements=1, num_compressed=1, steps=1)
    return [replace(first, progress=t, sent_elements=density) for t, density in rows]


def test_one_turn_moves_the_threshold_up_fast_and_down_slowly() -> None:
    for density, level in ((1.0, 4.0), (0.0, 0.8), (1e-9, 0.8), (BUDGET, 1.0)):
        seen = budget_run((0.0, 0.0), (0.02, density))
        _, last = replay(TotalErrorBudget(BUDGET, initial=1.0), seen)
        assert last.level == pytest.approx(level, rel=0.01)
        share = f"{density * 0.02 / BUDGET:.0%}"
        assert last.reason == f"{share} of the budget is spent after 2% of the run."


def test_one_turn_by_hand() -> None:
    """(0.01 − 0.1·0.04)/0.9 = 1/150 is wanted, 0.04 measured at 1.0: λ = √(0.04·150) = √6."""
    _, last = replay(TotalErrorBudget(BUDGET, initial=1.0), budget_run((0, 0), (0.1, 0.04)))
    assert last.level == pytest.approx(6**0.5)


def test_it_looks_back_as_far_as_ahead() -> None:
    """At 0.5 of the run the later half of the past counts, at 0.95 the last twentieth."""
    for over, before in ((0.5, (0.25, 0.0)), (0.95, (0.9, BUDGET))):
        for early in (0.0, BUDGET / 2):
            seen = budget_run((0, 0), (before[0], early), (over, BUDGET))
            state = {"level": 1.0, "spent": BUDGET * over / 2, "over": before[0]}
            rows = [[1.0, early, before[0]]]
            controller = TotalErrorBudget(BUDGET, initial=1.0)
            _, new = controller.decide(seen[-1], {**controller.init(), **state, "recent": rows})
            assert new["recent"] == [[1.0, BUDGET, pytest.approx(over - before[0])]]


def test_what_cannot_be_used_keeps_the_threshold() -> None:
    """A density that is not a number, and the end of the run."""
    controller = TotalErrorBudget(BUDGET, initial=1.0)
    for density, over in ((math.nan, 0.2), (0.5, 1.0), (0.5, 0.0)):
        seen = budget_run((0.0, 0.0), (over, density))
        assert replay(controller, seen)[-1].reason.startswith("The threshold is kept.")
        assert levels(controller, seen) == [1.0, 1.0]


def test_what_cannot_be_used_is_not_spent() -> None:
    seen = budget_run((0.0, 0.0), (0.1, math.nan), (0.2, 0.1))
    *_, last = replay(TotalErrorBudget(BUDGET, initial=1.0), seen)
    assert last.figures["budget_spent"] == pytest.approx(0.1 * 0.1 / BUDGET)
    assert last.level == pytest.approx(4.0)


def test_a_run_without_an_end() -> None:
    with pytest.raises(ValueError, match=r"0\.1.*Trainer\(max_epochs=\.\.\.\)"):
        replay(TotalErrorBudget(0.1), [Observation(-1, num_elements=9, num_compressed=9)])


@pytest.mark.parametrize("whole", [0, 40, 90])  # of 10,000 elements, in tensors sent whole
@pytest.mark.parametrize("drift", ["none", "falls", "warm-up and steps"])
def test_what_is_sent_whole_is_paid_for_out_of_the_budget(drift: str, whole: int) -> None:
    """The budget is of all elements, so the threshold has only the rest to spend."""
    first = Observation(-1, progress=0.0, num_elements=10_000, num_compressed=10_000 - whole)
    controller = TotalErrorBudget(BUDGET, initial=1.0)
    decision, state = controller.decide(first, controller.init())
    spent, last = 0.0, 0
    for step in turns(600, 6):
        assert decision.level is not None
        chosen = min(1.0, BUDGET * DRIFTS[drift](last / 600) * decision.level**-2)
        sent = (whole + chosen * (10_000 - whole)) * (step - last)
        spent += sent
        now = replace(first, epoch=0, progress=step / 600, steps=step - last, sent_elements=sent)
        decision, state = controller.decide(now, state)
        last = step
    assert spent / 600 / 10_000 == pytest.approx(BUDGET, rel=0.05)
    assert decision.figures["budget_spent"] == pytest.approx(spent / 600 / 10_000 / BUDGET)


def test_a_budget_that_no_threshold_keeps_is_refused_before_the_first_step() -> None:
    first = Observation(-1, progress=0.0, num_elements=1000, num_compressed=985)
    words = r"TotalErrorBudget\(budget=0\.015.*1\.50% of the elements.*PerParameter\(HardThreshold"
    with pytest.raises(ValueError, match=words):
        replay(TotalErrorBudget(0.015), [first])
    assert replay(TotalErrorBudget(0.016), [first])[0].level is not None
