"""Controllers that follow each other decide when each asks for it, as it would alone."""

from typing import Any

import numpy as np
import pytest

from lightning_gc import PerParameter, PowerSGD
from lightning_gc.control.control_loop import CONTROL_STATE, ControlLoop, Moment
from lightning_gc.controllers import (
    Chain,
    Controller,
    Fixed,
    Needs,
    Plan,
    RoundSchedule,
)
from lightning_gc.exchange.peers import Peers
from tests.support.controlled_workers import CPU, NUMEL, Listens, Training, loop


class FirstBatch(Listens):
    needs = Needs(gradients="first batch")


class Often(Listens):
    """Decides 20 times per run."""

    needs = Needs()

    def turns(self, epoch: int) -> int:
        return 20


class Quiet(Listens):
    needs = Needs()


def told(controllers: list[Listens], whole: Controller, epochs: int, steps: int) -> list[Any]:
    """Return of each controller when it was asked: the step, and whether an epoch had ended."""
    training = Training(1)
    decide = loop(training, whole, total_steps=epochs * steps)
    found: list[list[tuple[int, bool]]] = [[] for _ in controllers]
    for step in range(epochs * steps):
        decide(step // steps)
        for each, controller in zip(found, controllers, strict=True):
            each += [(step, one.ended) for one in controller.told[len(each) :]]
        training.step(np.random.default_rng(step).standard_normal((1, NUMEL)))
    return found


def test_the_first_batch_is_told_to_those_alone_who_ask_for_it() -> None:
    one, other = Quiet(), FirstBatch()
    both = [(8, True), (9, False), (12, True), (13, False)]
    assert told([one, other], Chain(one, other, 2), 4, 4) == [[(0, True), (4, True)], both]
    one, other = Quiet(), FirstBatch()
    both = [(0, True), (1, False), (4, True), (5, False)]
    whole = RoundSchedule((1,), levels=Chain(other, one, 2))
    assert told([other, one], whole, 4, 4) == [both, [(8, True), (12, True)]]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_pauses_double_from_where_a_controller_begins(at: int) -> None:
    often = Often()
    (asked,) = told([often], Chain(Fixed(0.1), often, at) if at else often, 3, 60)
    assert [step - 60 * at for step, _ in asked][:6] == [0, 1, 2, 4, 8, 16]


def test_a_resume_goes_on_with_the_doubling() -> None:
    often = Often()
    training = Training(1)
    control = ControlLoop(Chain(Fixed(0.1), often, 1), training.workers)
    control.attach()
    peers = Peers(True, CPU, mean=lambda tensor: tensor)
    asked = []
    for step in range(80):
        before = len(often.told)
        control.decide(step // 40, [training.sgd], lambda: Moment({}, total_steps=800), peers)
        asked += [step] * (len(often.told) - before)
        training.step(np.ones((1, NUMEL)))
        if step == 45:
            state = control.state_dict({})
            CONTROL_STATE.check(state)
            control.begin_anew()
            control.load_state_dict(state)
    assert asked == [40, 41, 42, 44, 48, 56, 72]


@pytest.mark.parametrize("first", [1, 32])
def test_tensors_are_seen_at_a_level_that_does_not_compress_them(first: int) -> None:
    """Rank 32 of 40 by 40 would send more than the matrix: it goes whole, and comes back."""
    training = Training(1, PerParameter(PowerSGD(first)), shape=(40, 40))
    told = Quiet()
    told.level = first
    decide = loop(training, told)
    for epoch in range(2):
        decide(epoch)
        training.step(np.random.default_rng(epoch).standard_normal((1, 1600)))
    assert [one.sizes for one in told.told] == [{"w": 1600}] * 2
    decide = loop(training, Plan({"w": 2}, default=32))
    for epoch in range(3):
        decide(epoch)
        assert training.workers.levels() == {"w": 2}
    training.workers.set_levels(32)
    assert training.workers.levels() == {"w": None}
