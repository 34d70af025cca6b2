"""Chain hands over from one controller to the next, and translates what the second is told."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc import HardThreshold, TopK
from lightning_gc.controllers import (
    Accordion,
    AdaQS,
    Chain,
    Controller,
    Curve,
    Decision,
    ExchangeRecord,
    Fixed,
    Needs,
    Observation,
    Point,
    Schedule,
    TotalError,
    TotalErrorBudget,
)
from tests.support.replay import levels, patient, replay


@dataclass(frozen=True)
class Diary(Controller):
    """Keeps what it was told: (epoch, max_epochs, progress, metrics, norms, density, steps)."""

    per_run: int = 0

    def turns(self, epoch: int) -> int:
        return self.per_run + epoch if self.per_run else 0

    def init(self) -> dict[str, Any]:
        return {"told": []}

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        o = observation
        entry = [o.epoch, o.max_epochs, o.progress and round(o.progress, 9), dict(o.metrics)]
        entry += [dict(o.gradient_norms), o.density, o.steps]
        return Decision(0.5), {"told": [*state["told"], entry]}


WHOLE: dict[str, Any] = {"num_elements": 100, "num_compressed": 100}
SENT: dict[str, Any] = {**WHOLE, "sent_elements": 70, "steps": 7}  # a density of 0.1


def epochs(number: int, norm: float = 1.0) -> list[Observation]:
    first = Observation(-1, max_epochs=number, progress=0.0, **WHOLE)
    rest = [
        replace(
            first,
            epoch=e,
            progress=(e + 1) / number,
            metrics={"m": e},
            gradient_norms={"w": norm + e},
            **SENT,
        )
        for e in range(number - 1)
    ]
    return [first, *rest]


@patient
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_a_chain_of_schedules_is_their_levels_one_after_the_other(at, total, n, m) -> None:
    first, then = [0.1 * (i + 1) for i in range(n)], [0.01 * (i + 1) for i in range(m)]
    wanted = [first[min(e, n - 1)] if e < at else then[min(e - at, m - 1)] for e in range(total)]
    chain = Chain(Schedule(tuple(first)), Schedule(tuple(then)), at_epoch=at)
    assert levels(chain, epochs(total)) == wanted


def test_chains_of_chains() -> None:
    chain = Chain(Fixed(1), Chain(Fixed(2), Fixed(3), at_epoch=2), at_epoch=1)
    assert levels(chain, epochs(5)) == [1, 2, 2, 3, 3]
    chain = Chain(Chain(Fixed(1), Fixed(2), at_epoch=1), Fixed(3), at_epoch=3)
    assert levels(chain, epochs(5)) == [1, 2, 2, 3, 3]


def test_what_the_second_one_is_told() -> None:
    """Its run begins at ``at_epoch``; nothing that came before is handed on."""
    chain = Chain(Diary(), Diary(), at_epoch=2)
    state = chain.init()
    for observation in epochs(5):
        _, state = chain.decide(observation, state)
    assert [entry[0] for entry in state["first"]["told"]] == [-1, 0]
    assert state["then"]["told"] == [
        [-1, 3, 0.0, {}, {}, 0.0, 0],
        [0, 3, round(1 / 3, 9), {"m": 2}, {"w": 3.0}, 0.1, 7],
        [1, 3, round(2 / 3, 9), {"m": 3}, {"w": 4.0}, 0.1, 7],
    ]


@dataclass(frozen=True)
class Listener(Controller):
    """Keeps all that it was told."""

    def init(self) -> dict[str, Any]:
        return {"told": []}

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        return Decision(0.5), {"told": [*state["told"], observation]}


def test_the_second_one_begins_as_in_a_new_run() -> None:
    """Seconds, curves, requests and bytes are those of the first one's levels."""
    new: dict[str, Any] = {
        "learning_rate": 0.1,
        "next_learning_rate": 0.1,
        "rates_ahead": (0.1, 0.05),
        "sizes": {"w": 100},
        **WHOLE,
    }
    told = Observation(
        1,
        max_epochs=5,
        progress=0.4,
        metrics={"m": 1.0},
        step_metrics=("m",),
        gradient_norms={"w": 1.0},
        error_norms={"w": 1.0},
        gradient_scale=1.0,
        wire_bytes=7.0,
        dense_bytes=9.0,
        gradient_noise=1.0,
        gradient_squared=1.0,
        gradient_dissimilarity=1.0,
        levels={"w": 0.5},
        error_curves={"w": Curve(1.0, (Point(0.5, 1.0, 1.0),))},
        step_seconds=0.3,
        phase_seconds={"communicate": 0.1},
        exchanges=(ExchangeRecord(1, 1e6, 0.1),),
        latency_us=1.0,
        bandwidth_gbps=1.0,
        link_r2=1.0,
        **(SENT | new | {"learning_rate": 1.0}),
    )
    chain = Chain(Fixed(1), Listener(), at_epoch=2)
    _, state = chain.decide(told, chain.init())
    assert state["then"]["told"] == [Observation(-1, max_epochs=3, progress=0.0, **new)]


def test_turns_within_epochs_go_to_the_one_whose_epoch_it_is() -> None:
    chain = Chain(Diary(per_run=10), Diary(per_run=20), at_epoch=2)
    deciding = [chain.deciding(epoch) for epoch in range(4)]
    turns = [one.turns(epoch - first) for epoch, (one, first) in enumerate(deciding)]
    assert turns == [10, 11, 20, 21]
    within = Observation(-1, max_epochs=5, progress=0.1, ended=False, **SENT)
    _, state = chain.decide(within, chain.init())
    start = Observation(1, max_epochs=5, progress=0.4, **SENT)
    for observation in (start, replace(start, progress=0.5, ended=False)):
        _, state = chain.decide(observation, state)
    assert state["first"]["told"] == [[-1, 5, 0.1, {}, {}, 0.1, 7]]
    assert state["then"]["told"] == [
        [-1, 3, 0.0, {}, {}, 0.0, 0],
        [-1, 3, round(1 / 6, 9), {}, {}, 0.1, 7],  # what it has sent itself does count
    ]


def test_accordion_after_a_warm_up_is_accordion_from_there_on() -> None:
    accordion = Accordion(low=0.2, high=0.1, interval=2)
    chain = Chain(Schedule.dgc_warmup(0.1, epochs=3), accordion, at_epoch=3)
    seen = epochs(12, norm=10.0)
    shifted = [Observation(-1)] + [
        Observation(o.epoch - 3, gradient_norms=o.gradient_norms) for o in seen[4:]
    ]
    assert [(d.level, d.levels) for d in replay(chain, seen)[3:]] == [
        (d.level, d.levels) for d in replay(accordion, shifted)
    ]


def test_a_budget_counts_from_the_hand_over() -> None:
    budget = TotalErrorBudget(0.1, initial=1.0)
    chain = Chain(Fixed(0.5), budget, at_epoch=2)
    decisions = replay(chain, epochs(6))
    assert decisions[2].figures["budget_spent"] == 0
    assert decisions[3].figures["budget_spent"] == pytest.approx(0.1 / (0.1 * 4))


def test_what_it_asks_for_is_what_either_needs() -> None:
    fixed, accordion = Fixed(0.1), Accordion(low=0.2, high=0.1)
    for chain in (Chain(fixed, accordion, 1), Chain(accordion, fixed, 1)):
        assert chain.needs == Needs(gradients="epoch sum")
    noise, simple = AdaQS(), TotalError(k_min=0.1)
    for chain in (Chain(noise, simple, 1), Chain(simple, noise, 1)):
        assert chain.needs == Needs(moments=True, errors=True)
    assert Chain(fixed, fixed, 1).needs == Needs()
    budget = TotalErrorBudget(0.1)
    for chain in (Chain(accordion, budget, 1), Chain(budget, Chain(fixed, accordion, 1), 1)):
        assert chain.needs == Needs(gradients="epoch sum", errors=True, scale=True)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"Chain\(at_epoch=0\): it must be 1 or more"):
        Chain(Fixed(1), Fixed(2), at_epoch=0)
    one = Accordion(low=0.2, high=0.1)
    with pytest.raises(
        ValueError, match="needs the gradients' epoch sum, the other their first batch"
    ):
        Chain(one, replace(one, detector="minibatch"), at_epoch=1)


def test_both_look_at_the_knob() -> None:
    accordion = Accordion(low=0.2, high=0.1)
    for chain in (Chain(Fixed(0.1), accordion, 1), Chain(accordion, Fixed(0.1), 1)):
        chain.check(TopK().knob)
        with pytest.raises(ValueError, match="swap"):
            chain.check(HardThreshold().knob)
    with pytest.raises(ValueError, match="this compressor has a density; use HardThreshold"):
        Chain(Fixed(0.1), TotalError(k_min=0.1), 1).check(TopK().knob)
