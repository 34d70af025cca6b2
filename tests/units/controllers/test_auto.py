"""Auto in a world of known seconds: what it keeps, what looking costs, and what it says."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc.controllers import (
    Auto,
    Candidate,
    Decision,
    ExchangeRecord,
    Observation,
    Weighed,
)
from lightning_gc.controllers.trace import _observation, append, replay
from lightning_gc.exchange.automatic import menu_of

Seconds = Mapping[float | None, float]
NAMES: dict[float | None, str] = {1: "QSGD(4)", 2: "QSGD(8)", 3: "Cast()", None: "uncompressed"}
MB: dict[float | None, float] = {1: 2.0, 2: 4.0, 3: 8.0, None: 16.0}


def steady(seconds: Seconds) -> Callable[[int], Seconds]:
    return lambda step: seconds


@dataclass
class World:
    """Runs a controller in a run whose seconds are known.

    Attributes:
        true: step -> choice -> seconds of that step.
        noise: spread of a step's seconds, as a share; one-sided, as interruptions are.
        wrong: factor by which predicted differences are wrong.
        length: of an epoch in steps.
        sixteen: name of the choice of 16 bits.
    """

    true: Callable[[int], Seconds]
    noise: float = 0.0
    wrong: float = 1.0
    length: int = 10**6
    sixteen: str = ""
    weighing: float = 0.01
    optimizers: tuple[str, ...] = ("SGD",)
    auto: Auto = field(default_factory=Auto)
    seed: int = 0
    total: int | None = None  # steps, as far as the controller knows
    said: list[str] = field(default_factory=list)
    levels: list[float | None] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    decisions: int = 0
    weighings: int = 0

    def run(self, steps: int) -> World:
        draw, state = random.Random(self.seed), self.auto.init()
        decision, state = self._decide(
            Observation(
                -1,
                optimizers=self.optimizers,
                total_steps=self.total,
                progress=None if self.total is None else 0.0,
            ),
            state,
        )
        last: list[float] = []
        for step in range(steps):
            level, true = decision.level, self.true(step)
            took = true[level] * (1 + self.noise * draw.expovariate(1.0))
            last.append(took)
            self.levels.append(level)
            self.spent.append(took)
            due = len(last) >= (decision.after or self.auto.every)
            if due or (step + 1) % self.length == 0:
                weighed = self._weighed(self.true(step), level) if decision.weigh else None
                rate = 8e-3 * MB[level] / max(true[level], 1e-9)
                seen = Observation(
                    step // self.length,
                    steps=len(last),
                    wire_bytes=1e6 * MB[level] * len(last),
                    dense_bytes=16e6 * len(last),
                    step_seconds=sum(last) / len(last),
                    each_step=tuple(last[-64:]),
                    total_steps=self.total,
                    progress=None if self.total is None else (step + 1) / self.total,
                    weighed=weighed,
                    exchanges=(ExchangeRecord(1, 1e6 * MB[level], 1e-3 * MB[level] / rate),),
                    optimizers=self.optimizers,
                )
                decision, state = self._decide(seen, state)
                last = []
        self.state = state
        return self

    def _decide(self, seen: Observation, state: Any) -> tuple[Decision, Any]:
        self.decisions += 1
        decision, new = self.auto.decide(seen, json.loads(json.dumps(state)))
        if decision.says:
            self.said.append(decision.says)
        return decision, new

    def _weighed(self, true: Seconds, now: float | None) -> Weighed:
        self.spent[-1] += self.weighing
        self.weighings += 1
        more = [self.wrong * (true[level] - true[now]) for level in NAMES]
        rows = zip(NAMES.items(), more, strict=True)
        found = tuple(Candidate(*each, seconds) for each, seconds in rows)
        return Weighed(self.weighing, found, self.sixteen)


SECONDS = st.fixed_dictionaries({level: st.floats(0.05, 5.0) for level in NAMES})


@given(SECONDS, st.sampled_from([3, 7, 50, 10**6]), st.floats(0.8, 1.25))
@settings(deadline=None, max_examples=200)
def test_it_is_never_slower_and_nearly_the_fastest(
    seconds: Seconds, length: int, wrong: float
) -> None:
    """Without noise; predictions may be a quarter off; epochs end at any step."""
    world = World(steady(seconds), length=length, wrong=wrong).run(400)
    kept, dense = world.levels[-1], seconds[None]
    assert seconds[kept] <= dense
    allowed = max(1 / 0.95, wrong, 1 / wrong)  # a gain that is predicted below 5 % is not tried
    fastest = min(seconds.values())
    assert seconds[kept] <= allowed * fastest or dense - fastest <= 0.05 * dense / 0.8


@given(SECONDS, st.integers(0, 100))
@settings(deadline=None, max_examples=100)
def test_looking_costs_a_few_steps_and_ends(seconds: Seconds, seed: int) -> None:
    world = World(steady(seconds), noise=0.03, seed=seed).run(600)
    kept = world.levels[-1]
    looking = [level for level in world.levels[:100] if level != kept]
    assert len(looking) <= 3 + 15 + 1 + 3 * 16
    assert set(world.levels[150:]) == {kept}
    first, *more = world.said
    assert first.startswith(f"auto: {NAMES[kept]}, since ")
    assert not more


def test_a_busy_machine_is_too_noisy_to_tell() -> None:
    found = [
        World(steady({1: 0.9, 2: 0.92, 3: 0.93, None: 1.0}), noise=1.0, seed=seed).run(300)
        for seed in range(20)
    ]
    kept = [world.levels[-1] for world in found]
    assert kept.count(None) >= 15
    said = [world.said[0] for world in found if "differ too much to tell" in world.said[0]]
    assert said


def changing(step: int) -> Seconds:
    """A link that is 10 times slower in the middle third."""
    if 700 <= step < 1400:
        return {1: 0.3, 2: 0.5, 3: 0.9, None: 1.7}
    return {1: 0.16, 2: 0.15, 3: 0.14, None: 0.12}


@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_changes_twice_costs_little_more_than_to_know_it(seed: int) -> None:
    world = World(changing, noise=0.02, seed=seed).run(2100)
    known = sum(min(changing(step).values()) * 1.02 for step in range(2100))
    assert sum(world.spent) <= 1.1 * known
    assert [world.levels[at] for at in (600, 1300, 2000)] == [None, 1, None]
    assert len(world.said) == 3


def test_it_looks_again_only_within_its_budget() -> None:
    """A link that changes every hundred steps, and a weighing that costs as much as ten steps."""

    def restless(step: int) -> Seconds:
        return {level: 10 * took for level, took in changing(700 * (step // 100 % 2)).items()}

    world = World(restless, weighing=10.0).run(4000)
    assert 2 <= world.weighings <= 2 + 0.01 * sum(world.spent) / 10


def test_under_muon_only_fine_rounding_is_tried() -> None:
    seconds: Seconds = {1: 0.1, 2: 0.2, 3: 0.3, None: 1.0}
    for optimizers, kept in {("SGD",): 1, ("Together", "Muon", "AdamW"): 2, (): 2}.items():
        world = World(steady(seconds), optimizers=optimizers).run(200)
        assert world.levels[-1] == kept, optimizers
        assert (1 in world.levels) == (kept == 1)


def test_a_menu_of_the_users_own_is_taken_as_it_is() -> None:
    seconds: Seconds = {1: 0.1, 2: 0.2, 3: 0.3, None: 1.0}
    world = World(steady(seconds), optimizers=("Muon",), auto=Auto(allow="feedback")).run(200)
    assert world.levels[-1] == 1


@pytest.mark.parametrize("workers", [0, 2, 8, 9, 64])
def test_among_many_workers_no_sparsifier_is_tried(workers: int) -> None:
    """The menu itself is asked, so that no entry is renamed without this."""
    menu, _ = menu_of("feedback")
    names: dict[float | None, str] = {**dict(enumerate(menu.names, 1)), None: "uncompressed"}
    found = tuple(Candidate(level, name, 0.0) for level, name in names.items())
    auto = Auto(allow="feedback")
    _, state = auto.decide(Observation(-1, optimizers=("SGD",)), auto.init())
    weighed = Weighed(0.0, found, workers=workers)
    _, state = auto.decide(Observation(0, optimizers=("SGD",), weighed=weighed), state)
    sparse = {name for name in menu.names if "TopK" in name}
    assert len(sparse) == 3
    left_out = sparse if workers > 8 else set()
    assert set(state["permitted"]) == set(menu.names) - left_out


def test_a_trace_keeps_all_that_was_weighed(tmp_path: Path) -> None:
    found = (Candidate(1, "TopK(0.01)", -1.0), Candidate(None, "uncompressed", 0.0))
    auto, weighed = Auto(allow="feedback"), Weighed(0.5, found, "Cast()", 16)
    seen = Observation(0, optimizers=("SGD",), weighed=weighed)
    decision, state = auto.decide(seen, auto.init())
    assert state["permitted"] == []
    append(tmp_path / "trace", seen, auto.init(), decision)
    [(first, second)] = replay(auto, tmp_path / "trace")
    assert first == second
    read = _observation(json.loads((tmp_path / "trace").read_text())["observation"])
    assert read == seen


def test_of_two_that_are_as_fast_the_one_that_sends_more_is_taken() -> None:
    world = World(steady({1: 0.100, 2: 0.101, 3: 0.3, None: 1.0})).run(200)
    assert world.levels[-1] == 2


def test_what_it_says_in_the_end() -> None:
    world = World(steady({1: 0.1, 2: 0.2, 3: 0.3, None: 1.0})).run(200)
    assert world.said == ["auto: QSGD(4), since a step takes 0.1 s in place of 1 s (uncompressed)."]
    ending = world.auto.ending(world.state)
    assert ending.startswith(
        "auto: QSGD(4) at the end, 0.1 s per step where uncompressed ones had taken 1 s, and 2 MB "
        "in place of 16. Other candidates: QSGD(8), Cast(). Measuring cost 0.01 s of the "
    )
    early = World(steady({1: 0.1, 2: 0.2, 3: 0.3, None: 1.0})).run(2)
    assert "before a method was chosen" in early.auto.ending(early.state)
    trying = World(steady({1: 0.1, 2: 0.2, 3: 0.3, None: 1.0})).run(12)
    assert trying.auto.ending(trying.state).startswith("auto: training ended while QSGD(4) was tri")


@pytest.mark.parametrize(("half", "chosen"), [(0.3, "QSGD(4)"), (0.1, "Cast()")])
def test_it_names_what_16_bits_would_take(half: float, chosen: str) -> None:
    """Predicted, or measured if they were tried. Where they are the choice, 32 bits are enough."""
    world = World(steady({1: 0.12, 2: 0.5, 3: half, None: 1.0}), sixteen="Cast()").run(200)
    beside = f" or {half} s (Cast(), 16 bits)" if chosen == "QSGD(4)" else ""
    (said,) = world.said
    assert said.startswith(f"auto: {chosen}, since a step takes ")
    assert said.endswith(f" s in place of 1 s (uncompressed){beside}.")
    assert f"had taken 1 s{beside}, and" in world.auto.ending(world.state)


def test_while_it_watches_it_decides_every_sixteen_steps() -> None:
    world = World(steady({1: 0.1, 2: 0.2, 3: 0.3, None: 1.0}), noise=0.02).run(1600)
    assert world.decisions <= 1600 / 16 + 10
    assert statistics.median(world.spent) < 0.11


def test_its_seconds_are_those_that_passed() -> None:
    """Windows have up to 1,000 steps, of which the clock keeps 64 one by one."""
    world = World(steady({1: 2e-3, 2: 3e-3, 3: 4e-3, None: 1e-3}), weighing=2.0).run(4000)
    passed = sum(world.spent)
    assert 0.7 * passed <= world.state["seconds"] <= passed + 1e-6
    said = world.auto.ending(world.state).rsplit("Measuring cost ", 1)[1].split(" s of the ")
    assert float(said[0]) <= float(said[1].split()[0])


def test_a_run_that_is_too_short_is_not_measured() -> None:
    seconds: Seconds = {1: 0.1, 2: 0.2, 3: 0.3, None: 1.0}
    world = World(steady(seconds), total=12, length=5).run(12)
    assert (world.weighings, set(world.levels)) == (0, {None})
    (line,) = world.said
    assert line.startswith("auto: uncompressed, since 12 steps are too few to measure")
    assert "too few to measure" in world.auto.ending(world.state)
    long = World(steady(seconds), total=60).run(60)
    assert long.levels[-1] == 1
