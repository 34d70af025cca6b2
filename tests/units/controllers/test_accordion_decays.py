"""Accordion under schedules that fall all the time, and what it says if it never compresses."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lightning_gc.controllers import Accordion, Observation
from tests.support.accordion import FLAT, HIGH, LOW, accordion, first_batches, little, observations
from tests.support.replay import replay

EPOCHS = 60
SCHEDULES = {
    "cosine": [0.05 * (1 + math.cos(math.pi * e / EPOCHS)) for e in range(EPOCHS + 1)],
    "linear": [0.1 * (1 - e / EPOCHS) for e in range(EPOCHS + 1)],
    "exponential": [0.1 * 0.95**e for e in range(EPOCHS + 1)],
}
STEPS = [0.1 * 0.1 ** ((e >= 20) + (e >= 40)) for e in range(EPOCHS + 1)]


@pytest.mark.parametrize("detector", ["epoch", "minibatch"])
@pytest.mark.parametrize("rates", SCHEDULES.values(), ids=SCHEDULES)
def test_a_rate_that_falls_every_epoch_is_no_decay_but_a_last_plunge(rates, detector: str) -> None:
    norms = {"w": [1.0] * EPOCHS}
    seen = observations if detector == "epoch" else partial(first_batches, steps=9)
    controller = Accordion(LOW, HIGH, interval=4, detector=detector)  # type: ignore[arg-type]
    decisions = [little(d, norms)["w"] for d in replay(controller, seen(norms, rates))]
    third = len(decisions) // 3
    assert not any(decisions[third : 2 * third])  # compressed throughout
    everything = replay(replace(controller, decay=1.0), seen(norms, rates))
    assert all(little(d, norms)["w"] for d in everything)


def test_the_papers_schedules_decay() -> None:
    norms = {"w": [1.0] * EPOCHS}
    seen = observations(norms, STEPS)
    by_default = replay(Accordion(LOW, HIGH, interval=4), seen)
    assert by_default == replay(accordion(4), seen)  # which counts every fall
    assert [i for i, d in enumerate(by_default) if "rate falls" in d.reason] == [20, 40]


@pytest.mark.parametrize(
    ("norms", "rates", "warned"),
    [
        ([1.0] * 12, [0.9**e for e in range(13)], [7]),  # every fall a decay
        ([4.0**e for e in range(12)], FLAT, [7]),  # norms never settle
        ([4.0**e for e in range(4)] + [4.0**4] * 8, FLAT, []),  # they do at the third check
        ([1.0] * 12, FLAT, []),
    ],
)
def test_a_warning_where_nothing_is_ever_compressed(
    norms: list[float], rates: list[float], warned: list[int]
) -> None:
    """Checks are in epochs 0, 2, 4 and 6; the first has nothing to compare with."""
    rates = (rates * 2)[:13]
    decisions = replay(accordion(2), observations({"w": norms}, rates))
    assert [i for i, d in enumerate(decisions) if d.warning] == warned
    for i in warned:
        for words in ("decay=1.0", "level 0.01 in 3 checks", "50% or more", "1/1 or", "Raise"):
            assert words in decisions[i].warning


@pytest.mark.parametrize("detector", ["epoch", "minibatch"])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_warning_where_the_run_is_too_short(interval: int, detector: Any) -> None:
    """In every run that is warned of, and no other, all levels stay low, whatever the norms."""
    controller = Accordion(0.1, 0.01, interval, detector=detector)
    for epochs in range(1, 8):
        told = []
        for epoch in range(epochs):
            before = {} if epoch == 0 or detector == "minibatch" else {"w": 1.0}
            told.append(Observation(epoch - 1, gradient_norms=before, max_epochs=epochs))
            if detector == "minibatch":
                told.append(Observation(epoch - 1, gradient_norms={"w": 1.0}, ended=False))
        decisions = replay(controller, told)
        stays = all(set(d.levels.values()) <= {0.1} for d in decisions)
        assert bool(decisions[0].warning) == stays
        assert not any(d.warning for d in decisions[1:])
