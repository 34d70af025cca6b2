"""Budget finds H where exchanges keep to their share of the time, and follows a link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc import (
    Elastic,
    GrowingRounds,
    LocalSteps,
    LocalStepsStrategy,
    NetworkModel,
    SimulatedLocalStepsStrategy,
    TopK,
)
from lightning_gc.controllers import (
    Accordion,
    BandwidthAware,
    Budget,
    Observation,
    RoundSchedule,
)
from tests.processes.test_link_controllers import same
from tests.support.fitting import fit, unwarned
from tests.support.models import Books, common_batches


def course(budget: Budget, exchange: Any, step: float, decisions: int) -> list[int]:
    """Return H after each decision but the first exchange's; ``exchange`` gets its number."""
    decision, state = budget.decide(Observation(-1), budget.init())
    found: list[int] = []
    for number in range(-1, decisions):
        assert decision.every is not None
        spent = exchange(number)
        phases = {"compress": 0.2 * spent, "communicate": 0.7 * spent, "decode": 0.1 * spent}
        whole = decision.every * step + spent
        seen = Observation(0, steps=4, step_seconds=whole, phase_seconds=phases)
        decision, state = budget.decide(seen, state)
        assert decision.every is not None
        found.append(decision.every)
    assert found[0] == budget.shortest, "the first exchange decides nothing"
    return found[1:]


def observed(steps: int, every: int, step: float, spent: float, wait: float = 0.0) -> Observation:
    """Return what is seen of rounds of H steps, with the seconds of an exchange."""
    phases = {"communicate": spent, "wait": wait}
    whole = every * step + spent + wait
    return Observation(0, ended=False, steps=steps, step_seconds=whole, phase_seconds=phases)


def run(
    budget: Budget, rounds: int, exchange: Any, wait: float = 0.0, epoch: int = 1000
) -> list[Any]:
    """Return a decision for each round, as a loop asks for them; seconds of a step: 1.

    ``exchange``: seconds, by number of the round and H. ``wait``: seconds for each step. ``epoch``:
    rounds, at whose end a decision is due, too.
    """
    decision, state = budget.decide(Observation(-1), budget.init())
    found, seen = [], list[float]()
    for number in range(rounds):
        every = decision.every
        assert every is not None
        seen.append(exchange(number, every))
        due = decision.after or max(min(number + 1 - len(seen), budget.rounds), 1)
        if len(seen) >= due or number % epoch == epoch - 1:
            spent, count = sum(seen) / len(seen), len(seen)
            observation = observed(count, every, 1.0, spent, wait * every)
            decision, state = budget.decide(observation, json.loads(json.dumps(state)))
            seen = []
        found.append(decision)
    return found


def test_waiting_for_a_slower_worker_raises_nothing_and_is_said_once() -> None:
    """A step waits for half a second, so that waiting takes a third of the time at every H."""
    equal = run(Budget(0.1), 40, lambda number, every: 0.3)
    found = run(Budget(0.1), 40, lambda number, every: 0.3, wait=0.5)
    assert [each.every for each in found][-1] <= [each.every for each in equal][-1] == 4
    said = [each.warning for each in found if each.warning]
    (warning,) = set(said)
    assert "workers are unequal" in warning
    assert "unequal=Unequal()" in warning
    assert not any(each.warning for each in equal)


def test_a_larger_h_that_lowers_no_share_is_taken_back() -> None:
    """Exchanges last longer with H: no H keeps to the share, and the longest is never tried."""
    every = [each.every for each in run(Budget(0.1), 60, lambda number, every: 0.5 * every)]
    assert max(every) < 16
    assert every[-1] == 1
    assert every.count(1) > 40


def test_epochs_shorter_than_the_rounds_of_a_decision() -> None:
    """Two rounds each: H is judged by the rounds of several, rises again, and the wait is told."""
    often = [each.every for each in run(Budget(0.1), 60, lambda n, every: 1 + n // 20, epoch=2)]
    assert [often[19], often[59]] == [16, 32]
    back = [each.every for each in run(Budget(0.1), 60, lambda n, every: 0.5 * every, epoch=2)]
    assert back[-1] == 1
    assert any(each.warning for each in run(Budget(0.1), 40, lambda n, _: 0.3, 0.5, epoch=2))


def test_cold_exchanges_do_not_hold_h_too_high() -> None:
    """The first two take as long as 40 steps, the others as one step: H is 16."""
    found = [each.every for each in run(Budget(0.1), 20, lambda n, _: 40.0 if n < 2 else 1.0)]
    assert found[0] == 1
    assert found[1] == 512, "the second one counts"
    assert found[2:] == [16] * 18, "one round later it is seen"


def share(every: int, spent: float, step: float) -> float:
    return spent / (every * step + spent)


@given(st.floats(1e-4, 10.0), st.floats(1e-3, 1.0), st.floats(0.02, 0.5))
@settings(deadline=None)
def test_it_takes_the_least_h_within_the_budget(spent: float, step: float, limit: float) -> None:
    budget = Budget(limit)
    every = course(budget, lambda _: spent, step, 3)
    assert len(set(every)) == 1
    kept = share(every[-1], spent, step) <= limit * (1 + 1e-9)
    assert kept or every[-1] == budget.longest
    assert every[-1] == 1 or share(every[-1] // 2, spent, step) > limit * (1 - 1e-9)


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0))
@settings(deadline=None)
def test_it_follows_a_link_and_comes_to_rest(before: float, after: float) -> None:
    every = course(Budget(), lambda number: before if number < 10 else after, 0.1, 40)
    assert len(set(every[25:])) == 1
    assert share(every[-1], after, 0.1) <= 0.1 + 1e-9 or every[-1] == 512
    # It stays at twice the least H only where that one would be near the limit.
    assert every[-1] == 1 or share(every[-1] // 2, after, 0.1) > 0.8 * 0.1


def test_h_is_a_power_of_two_times_the_shortest() -> None:
    assert Budget(shortest=3, longest=50).steps == (3, 6, 12, 24, 48)
    assert course(Budget(shortest=3, longest=50), lambda _: 100.0, 0.1, 2) == [48, 48]


def test_levels_have_their_own_controller() -> None:
    budget = Budget(levels=Accordion(low=0.5, high=0.1, interval=1))
    decision, state = budget.decide(Observation(-1), budget.init())
    assert (decision.level, decision.every, decision.keeps_levels) == (0.5, 1, False)
    within = Observation(0, ended=False, steps=1, step_seconds=1.0)
    assert budget.decide(within, state)[0].keeps_levels


def simulated(budget: Any, **more: Any) -> dict[str, Any]:
    strategy = SimulatedLocalStepsStrategy(TopK(0.5), every=budget, workers=2, **more)
    with unwarned():
        return fit(strategy, Books, common_batches(192, 4), max_epochs=1)


def test_simulated_workers_take_seconds_from_the_network(tmp_path: Path) -> None:
    """A message takes an hour, so that no H within the limits is enough; its trace replays."""
    path = tmp_path / "trace.jsonl"
    budget = Budget(0.1, longest=4, rounds=1, trace=str(path))
    left = simulated(budget, network=NetworkModel(latency_us=3.6e9))
    assert left["controller"]["every"] == 4
    same(path, budget)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": 0.0}, "a share of the time"),
        ({"share": 1.5}, "a share of the time"),
        ({"shortest": 0}, "1 or more"),
        ({"rounds": 1.5}, "a whole number"),
        ({"shortest": 8, "longest": 4}, "exchange the two"),
        ({"levels": BandwidthAware((0.5, 0.1), 1.0)}, "decides within epochs"),
        ({"levels": Accordion(low=0.5, high=0.1, detector="minibatch")}, "decides within epochs"),
    ],
)
def test_settings_that_cannot_work(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"Budget\(.*{said}"):
        Budget(**given)


def test_what_it_cannot_be_combined_with() -> None:
    with pytest.raises(ValueError, match=r"use 2 or fewer|use fragments=1 or fewer"):
        LocalStepsStrategy("cast", every=Budget(), fragments=2)
    LocalStepsStrategy("cast", every=Budget(shortest=4), fragments=2, delay=1)
    with pytest.raises(ValueError, match="a second one that decides"):
        LocalStepsStrategy("cast", every=Budget(), controller=RoundSchedule((1, 2)))
    with pytest.raises(ValueError, match="no epoch is common"):
        LocalStepsStrategy("cast", every=Budget(), elastic=Elastic("10.0.0.1:29400"))
    with pytest.raises(ValueError, match="both set"):
        LocalStepsStrategy("cast", every=GrowingRounds(0.1), controller=Budget())
    with pytest.raises(ValueError, match="call begin_batch"):
        LocalSteps(object(), object(), "cast", every=Budget())  # type: ignore[arg-type]


def test_the_controller_of_levels_goes_into_it() -> None:
    accordion = Accordion(low=0.1, high=0.01)
    strategy = LocalStepsStrategy(TopK(0.01), every=Budget(0.2), controller=accordion)
    assert strategy.controller == Budget(0.2, levels=accordion)
    assert strategy.plan.shortest == 1
