"""Rounds of unequal workers do what slow NumPy says, and lose nothing that they do not name."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gc import (
    QSGD,
    EFSignSGD,
    ErrorFeedback,
    HardThreshold,
    Identity,
    NetworkModel,
    NoMemory,
    OuterSGD,
    PerParameter,
    PowerSGD,
    Quantised,
    Roll,
    TopK,
    Unequal,
)
from lightning_gc.compressors import Compressor
from lightning_gc.elastic.roll import Round
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.workers import Workers
from lightning_gc.lightning.for_pytorch_lightning import (
    LocalStepsStrategy,
    SimulatedLocalStepsStrategy,
)
from lightning_gc.lightning.simulation.simulated_local_steps import Exchanges
from lightning_gc.local_steps.local_rounds import CommonState, LocalRounds, OwnState
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.local_steps.unequal import SimulatedClock, resting
from lightning_gc.transports.base import all_gather_bytes
from lightning_gc.transports.simulated import Ledger

Numbers = dict[str, np.ndarray[Any, Any]]
SPEEDS = (1.0, 0.5, 0.5)
HALF = Unequal(pace=SPEEDS, weigh="equal")
REPLAYED = {"roll": Roll([Round(0, (0, 1))]), "workers": None}


class Model(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(3))


class Group:
    """Simulated workers whose steps are random moves; counts what each has come since."""

    def __init__(
        self,
        unequal: Unequal | None,
        speeds: Sequence[float] = SPEEDS,
        compressor: Compressor = Identity(),  # noqa: B008 - frozen
        memory: Any = None,
        outer: Any = OuterSGD(),  # noqa: B008 - frozen
        every: int = 8,
        network: NetworkModel | None = None,
        **plan: Any,
    ) -> None:
        number = len(speeds)
        workers = Workers(Compression(PerParameter(compressor), memory).configured("a test"))
        self.models = [Model() for _ in speeds]
        workers.name(self.models[0])
        self.ledger = Ledger(number, network or NetworkModel())
        workers.start(self.ledger.pages, revocable=True)
        self.clock = SimulatedClock(speeds, None if unequal is None else unequal.grace)
        ends = Exchanges(workers, self.ledger, torch.device("cpu"), self.clock).of
        made = RoundPlan(every, outer, unequal=unequal, **plan)
        self.rounds = [
            LocalRounds(
                model,
                {p: n for n, p in model.named_parameters()},
                engine,
                end,
                made,
                clock=self.clock,
            )
            for model, engine, end in zip(self.models, workers.engines, ends, strict=True)
        ]
        self.engines = workers.engines
        self.sizes: Sequence[float] = [1.0] * number
        self.made = [0] * number
        self.moves = [torch.Generator().manual_seed(w) for w in range(number)]

    def step(self, ends: bool = False, tokens: Sequence[int] | None = None) -> None:
        for worker, (model, rounds) in enumerate(zip(self.models, self.rounds, strict=True)):
            if not rounds.rests:
                self.made[worker] += 1
                rounds.share.count(1 if tokens is None else tokens[worker])
                for param in model.parameters():
                    move = torch.randn(param.shape, generator=self.moves[worker])
                    param.data.add_(0.01 * self.sizes[worker] * move)
        waits = [rounds.stepped(ends) for rounds in self.rounds]
        while waits:
            for each in list(waits):
                try:
                    next(each)
                except StopIteration:
                    waits.remove(each)

    def round(self, ends: bool = False, tokens: Sequence[int] | None = None) -> None:
        for step in range(self.rounds[0].every):
            self.step(ends and step == self.rounds[0].every - 1, tokens)

    def anchor(self) -> Numbers:
        (fragment,) = self.rounds[0].weights.fragments
        for other in self.rounds[1:]:
            assert torch.equal(other.weights.fragments[0].anchor, fragment.anchor)
        return {n: t.double().numpy() for n, t in fragment.named(fragment.anchor).items()}

    def distances(self) -> list[Numbers]:
        """Return Δ of every worker, by name."""
        found = []
        for rounds in self.rounds:
            (fragment,) = rounds.weights.fragments
            named = fragment.named(fragment.distance())
            found.append({n: t.double().numpy() for n, t in named.items()})
        return found

    def errors(self) -> Numbers:
        """Return the mean error."""
        each = [
            {n: e.double().numpy() for n, e in engine.errors().items()} for engine in self.engines
        ]
        zero = {n: np.zeros_like(v) for n, v in self.anchor().items()}
        return {n: np.mean([e.get(n, zero[n]) for e in each], 0) for n in zero}


def before_the_exchange(group: Group, run: Any) -> list[Numbers]:
    """Run until an exchange is due, and return the distances just before it."""
    seen: list[list[Numbers]] = []
    depart = group.clock.depart

    def watched(worker: int, *, wait: bool) -> bool:
        if worker == 0:
            seen.append(group.distances())
        return depart(worker, wait=wait)

    group.clock.depart = watched  # type: ignore[method-assign]
    run()
    group.clock.depart = depart  # type: ignore[method-assign]
    (found,) = seen
    return found


def reference(
    distances: list[Numbers],
    weights: Sequence[float],
    steps: Sequence[int],
    clip: bool,
) -> Numbers:
    """Return Δ̄ as the formulas say it, worker by worker."""
    counted = [w for w in range(len(weights)) if weights[w] > 0]
    total = sum(weights[w] for w in counted)
    mean = {}
    for name in distances[0]:
        norms = {w: float(np.linalg.norm(distances[w][name])) for w in counted}
        factor = dict.fromkeys(counted, 1.0)
        if clip:
            ranked: list[float] = sorted(norms[w] / steps[w] for w in counted)
            middle = ranked[(len(ranked) - 1) // 2]
            factor = {w: min(1.0, float(steps[w] * middle / norms[w])) for w in counted}
        shares = {w: weights[w] / total for w in counted}
        vectors = {w: shares[w] * distances[w][name] for w in counted}
        mean[name] = np.sum([factor[w] * vectors[w] for w in counted], 0)
    return mean


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("weigh", ["equal", "steps", "tokens"])
def test_the_mean_is_that_of_the_formula(weigh: Any, clip: bool) -> None:
    unequal = Unequal(pace=SPEEDS, weigh=weigh, median_clip=clip)
    group = Group(unequal)
    group.sizes = (1, 1, 9)
    tokens = (10, 50, 7)
    for _ in range(3):
        before = group.anchor()
        distances = before_the_exchange(group, lambda: group.round(tokens=tokens))
        steps = (8, 4, 4)
        weights = {"equal": (1, 1, 1), "steps": steps, "tokens": (80, 200, 28)}[weigh]
        mean = reference(distances, weights, steps, clip)
        for name, after in group.anchor().items():
            np.testing.assert_allclose(before[name] - after, mean[name], atol=1e-6)


KINDS: tuple[tuple[Compressor, Any], ...] = (
    (TopK(0.1), ErrorFeedback()),
    (Quantised(TopK(0.1), QSGD(4)), ErrorFeedback()),
    (QSGD(2), ErrorFeedback()),
    (EFSignSGD(), ErrorFeedback()),
    (PowerSGD(1), ErrorFeedback()),
    (HardThreshold(0.05), ErrorFeedback()),
    (Identity(), NoMemory()),
)


@pytest.mark.parametrize(("compressor", "memory"), KINDS, ids=lambda each: type(each).__name__)
def test_nothing_is_lost_whatever_each_round_weighs(compressor: Compressor, memory: Any) -> None:
    """Σ applied + mean error = Σ of the weighted means, with late workers and other weights."""
    unequal = Unequal(pace="equal", weigh="tokens", grace=0.5)
    group = Group(unequal, compressor=compressor, memory=memory, every=4)
    start, random = group.anchor(), np.random.default_rng(0)
    come = {n: np.zeros_like(v) for n, v in start.items()}
    carried = np.zeros(3)
    late = 0
    for step in range(12):
        tokens = random.integers(1, 100, 3).tolist()
        made = list(group.made)
        run = functools.partial(group.round, ends=step == 11, tokens=tokens)
        distances = before_the_exchange(group, run)
        carried += np.array(tokens) * (np.array(group.made) - made)
        on_time = np.array([not rounds.share.late for rounds in group.rounds])
        late += 3 - on_time.sum()
        shares = carried * on_time / np.sum(carried * on_time)
        for name in come:
            for share, distance in zip(shares.tolist(), distances, strict=True):
                come[name] += share * distance[name]
        carried[on_time] = 0
    assert late > 8
    left, now = group.errors(), group.anchor()
    for name, each in come.items():
        gap = start[name] - now[name] + left[name] - each
        assert np.linalg.norm(gap) < 2e-6 * max(1.0, float(np.linalg.norm(each))), name


def test_a_late_result_is_in_the_next_round_as_it_was() -> None:
    """Workers of half the speed are late in every second round, and then count with all steps."""
    group = Group(Unequal(pace="equal", weigh="equal", grace=0.5))
    before = group.anchor()
    first = before_the_exchange(group, group.round)
    for name, after in group.anchor().items():
        np.testing.assert_allclose(before[name] - after, first[0][name], atol=1e-6)
    kept = group.distances()
    assert [rounds.share.late for rounds in group.rounds] == [False, True, True]
    assert group.made == [8, 8, 8]
    for name in before:
        assert not kept[0][name].any()
        np.testing.assert_allclose(kept[1][name], first[1][name], atol=1e-6)
    before, second = group.anchor(), before_the_exchange(group, group.round)
    assert group.made == [16, 8, 8], "they had no time for steps"
    mean = reference(second, (1, 1, 1), (8, 8, 8), clip=False)
    for name, after in group.anchor().items():
        np.testing.assert_allclose(before[name] - after, mean[name], atol=1e-6)
    assert not any(rounds.share.late for rounds in group.rounds)
    group.round(ends=True)
    assert not any(each.any() for named in group.distances() for each in named.values())


def test_a_late_worker_keeps_what_its_buffers_have_come() -> None:
    group = Group(Unequal(pace="equal", grace=0.5))
    for model, value in zip(group.models, (3.0, 6.0, 9.0), strict=True):
        model.seen.fill_(value)
    group.round()
    assert [float(model.seen[0]) for model in group.models] == [1.0, 7.0, 10.0]
    group.round()
    assert [float(model.seen[0]) for model in group.models] == [6.0, 6.0, 6.0]


def test_one_astray_is_clipped_and_one_not_finite_is_left_out() -> None:
    group = Group(Unequal(pace="equal", weigh="equal", median_clip=True), (1.0,) * 4)
    group.sizes = (1, 1, 1, 1e6)
    before = group.anchor()
    group.round()
    moved = max(np.abs(before[name] - after).max() for name, after in group.anchor().items())
    assert moved < 1, "without the clip it would be thousands"
    group.sizes = (1, 1, 1, float("nan"))
    before = group.anchor()
    with pytest.warns(UserWarning, match="worker 3 were not finite at round 2.*Its 8 steps"):
        distances = before_the_exchange(group, group.round)
    mean = reference(distances, (1, 1, 1, 0), (8,) * 4, clip=True)
    for name, after in group.anchor().items():
        np.testing.assert_allclose(before[name] - after, mean[name], atol=1e-6)
    assert all(not each.any() for each in group.distances()[3].values())


@pytest.mark.parametrize("length", [1, 2, 3, 8, 32])
def test_skipped_steps_are_spread_evenly(length: int) -> None:
    for steps in range(length + 1):
        made = [not resting(position, steps, length) for position in range(length)]
        assert sum(made) == steps
        for position in range(length):
            ideal = steps * (position + 1) / length
            assert 0 <= sum(made[: position + 1]) - ideal + 1e-9 < 1


def test_steps_follow_measured_speeds() -> None:
    """The first round measures; then all rounds end together."""
    group = Group(Unequal())
    group.round()
    assert group.made == [8, 8, 8]
    group.round()
    group.round()
    assert group.made == [24, 16, 16]
    group.clock.speeds = (0.25, 1.0, 0.5)  # they change
    group.round()
    before = list(group.made)
    group.round()
    assert [now - then for now, then in zip(group.made, before, strict=True)] == [2, 8, 4]


def test_predicted_seconds_are_steps_and_messages() -> None:
    slow = NetworkModel(bandwidth_gbps=1e-6)
    equal, by_speed = Group(None, network=slow), Group(HALF, network=slow)
    for group in (equal, by_speed):
        for _ in range(3):
            group.round()
    messages = equal.ledger.communicated
    assert messages > 0.1
    assert equal.clock.seconds == pytest.approx(3 * 8 / 0.5 + messages)
    assert by_speed.clock.seconds == pytest.approx(3 * 8 + messages)


@pytest.mark.parametrize(
    ("unequal", "numbers"),
    [(None, 0), (HALF, 0), (Unequal(), 3), (Unequal(median_clip=True), 6)],
)
def test_what_workers_agree_on_is_counted(unequal: Any, numbers: int) -> None:
    """One number for each of three tensors, and three more; 4 bytes each, in units of 16."""
    plain, group = Group(None), Group(unequal)
    for each in (plain, group):
        each.round()
    more = group.ledger.transport.sent_bytes[0] - plain.ledger.transport.sent_bytes[0]
    assert more == all_gather_bytes(-(-4 * numbers // 16) * 16, 3)


def test_equal_weights_are_as_without() -> None:
    plain, same = Group(None), Group(Unequal(pace="equal", weigh="steps"))
    for group in (plain, same):
        group.round()
        group.round()
    for name, each in plain.anchor().items():
        assert np.array_equal(each, same.anchor()[name])


SETTINGS: dict[str, dict[str, Any]] = {
    "measured": {"unequal": Unequal(), "compressor": TopK(0.1)},
    "late": {"unequal": Unequal(grace=0.5), "compressor": TopK(0.1)},
    "tokens, clipped, fragments": {
        "unequal": Unequal(weigh="tokens", median_clip=True),
        "compressor": QSGD(4),
        "fragments": 2,
    },
    "delayed": {"unequal": Unequal(), "outer": OuterSGD.diloco(), "delay": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resumes_bit_for_bit(name: str) -> None:
    """From states within and between rounds, as plain values."""
    for at in (5, 8, 19):
        whole = Group(**SETTINGS[name])
        for _ in range(at):
            whole.step()
        for rounds in whole.rounds:
            rounds.arrive()
        common = copy.deepcopy(CommonState(whole.rounds).common_state())
        CommonState.common_structure.check(common)
        own = [copy.deepcopy(OwnState(r, list, lambda: None).own_state()) for r in whole.rounds]
        OwnState.structure.check(own[0])
        engines = [engine.state_dict() for engine in whole.engines]
        resumed = Group(**SETTINGS[name])
        for model, rounds in zip(resumed.models, whole.rounds, strict=True):
            for n, p in model.named_parameters():
                (piece,) = [f.named(f.anchor)[n] for f in rounds.weights.fragments if n in f.params]
                p.data.copy_(piece)
        for engine, state in zip(resumed.engines, engines, strict=True):
            engine.load_state_dict(state)
        CommonState(resumed.rounds).load_common_state(common)
        for rounds, state in zip(resumed.rounds, own, strict=True):
            OwnState(rounds, list, lambda: None).load_own_states([state])
        for worker, moves in enumerate(whole.moves):
            resumed.moves[worker].set_state(moves.get_state())
        resumed.made = list(whole.made)
        for group in (whole, resumed):
            for _ in range(20):
                group.step()
            group.step(ends=True)
        assert resumed.made == whole.made
        assert resumed.clock.reached == whole.clock.reached
        for ours, theirs in zip(resumed.models, whole.models, strict=True):
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(a, b), at


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pace": "fast"}, "use 'measured', 'equal', or one speed for each worker"),
        ({"pace": (1.0, 0.0)}, "a number above 0 for each worker"),
        ({"pace": ()}, "a number above 0 for each worker"),
        ({"weigh": "rows"}, "use 'equal', 'steps' or 'tokens'"),
        ({"grace": -1.0}, "seconds to wait for late workers must be 0 or more"),
        ({"grace": "1"}, "write 1, without quotes"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Unequal(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"unequal": "measured"}, r"give an instance, such as Unequal\(\)"),
        ({**REPLAYED, "unequal": HALF}, "would scale distances twice; leave unequal out"),
        ({"speeds": (1.0, -1.0)}, "a number above 0 for each worker"),
        ({"unequal": Unequal(pace=(1.0, 2.0, 3.0))}, "3 speeds for 2 workers; give 2, or use"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SimulatedLocalStepsStrategy(**{"compressor": QSGD(4), "workers": 2, **settings})


def test_the_strategy_with_processes_takes_the_same_options_but_grace() -> None:
    strategy = LocalStepsStrategy(QSGD(4), outer=OuterSGD.diloco(), unequal=HALF)
    assert strategy.plan.unequal == HALF
