"""Rounds of one worker, whose exchange is answered at once."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gc import ErrorFeedback, GrowingRounds, NoMemory, OuterSGD, PerParameter, TopK
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.peers import Parts
from lightning_gc.exchange.workers import Workers
from lightning_gc.local_steps.common_weights import in_fragments
from lightning_gc.local_steps.local_rounds import (
    LOST_IN_A_ROW,
    CommonState,
    LocalRounds,
    MeanDrift,
    finished,
)
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.transports import Simulated


class Alone:
    """In the place of a synchronizer: one worker, and nothing runs in the background."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        account: Any = SimpleNamespace(worker=0, workers=1, timing=False, sent_bytes=0)
        workers.start([account], revocable=True)

    def submit(self, grad: torch.Tensor, shapes: Any) -> Any:
        return self.run(lambda: (self.workers.first.flow(grad, shapes), grad), grad)

    def run(self, make: Any, result: torch.Tensor) -> Any:
        Simulated(1).run([make()[0]])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    def end_round(self, common: Any) -> None:
        self.workers.end_round([])

    def landed(self) -> None:
        pass

    def check(self) -> None:
        pass


def rounds_of(
    module: nn.Module,
    every: int | GrowingRounds,
    method: tuple[Any, Any] = (PerParameter(TopK(1.0)), NoMemory()),
    parts: Parts = Parts(),  # noqa: B008 - has no state
    **plan: Any,
) -> LocalRounds:
    workers = Workers(Compression(*method).configured("a test"))
    workers.name(module)
    alone: Any = Alone(workers)
    made = RoundPlan(every, **plan)
    given = (module, workers.names, workers.first, alone, made)
    return LocalRounds(*given, parts=parts)


class OtherPart(Parts):
    """The other part of a worker, and which of the questions to it has the answer yes."""

    several = True

    def __init__(self, yes: int) -> None:
        self.yes, self.asked = yes, 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return tensor.double() + (self.asked == self.yes)


@pytest.mark.parametrize("yes", [3, 4], ids=["distance", "mean"])
def test_a_worker_in_parts_loses_a_round_in_all_of_them(yes: int) -> None:
    """Errors are then as before, unless only the mean was not finite, which no part could know."""
    module = nn.Linear(6, 4)
    other = OtherPart(yes)
    rounds = rounds_of(module, 1, (PerParameter(TopK(0.2)), ErrorFeedback()), other)
    engine = rounds._engine

    def train() -> bool:
        with torch.no_grad():
            module.weight.add_(torch.arange(24.0).view(4, 6))
        return finished(rounds.stepped(ends=False))

    def errors() -> list[float]:
        kept: list[float] = engine.state_dict()["memory"]["weight"]["error"].flatten().tolist()
        return kept

    assert train()
    common, before = module.weight.detach().clone(), errors()
    with pytest.warns(UserWarning, match="its 1 steps are lost"):
        assert not train()
    assert other.asked == 4
    assert torch.equal(module.weight, common)
    assert (errors() == before) == (yes == 3)
    assert train()


def test_too_many_lost_rounds_end_the_run() -> None:
    """Each is warned of; a finite one between them starts the count anew."""
    module = nn.Linear(3, 2)
    rounds = rounds_of(module, 2)
    (weights,) = rounds.weights.fragments
    start = weights.anchor.clone()

    def lose() -> None:
        for _ in range(2):
            module.weight.data.fill_(float("nan"))
            kept = finished(rounds.stepped(ends=False))
        assert not kept
        assert torch.equal(weights.weights(), start)

    for _ in range(LOST_IN_A_ROW - 1):
        with pytest.warns(UserWarning, match="its 2 steps are lost"):
            lose()
    assert finished(rounds.stepped(ends=True)), "a round of one step"
    for _ in range(LOST_IN_A_ROW - 1):
        with pytest.warns(UserWarning, match="its 2 steps are lost"):
            lose()
    with pytest.raises(RuntimeError, match=r"10 such rounds in a row.*gradient_clip_val"):
        lose()


def test_what_is_shown_is_put_back() -> None:
    module = nn.Linear(3, 2)
    rounds = rounds_of(module, 5)
    (weights,) = rounds.weights.fragments
    start, own = weights.anchor.clone(), weights.weights() + 1
    weights.put(own)
    finished(rounds.stepped(ends=False))
    for _ in range(2):  # the second has no effect
        rounds.weights.show()
        assert torch.equal(weights.weights(), start)
    named, _ = rounds.weights.own()
    assert torch.equal(torch.cat([t.view(-1) for t in named.values()]), own)
    for _ in range(2):
        rounds.weights.hide()
        assert torch.equal(weights.weights(), own)


@pytest.mark.parametrize("merge", ["rebase", "mix"])
@pytest.mark.parametrize("steps", range(3, 9))
def test_nothing_counts_twice_after_a_resume_by_means(steps: int, merge: str) -> None:
    """Of one worker the mean is its own, so the run goes on as if it had not stopped.

    Rounds of four steps, taken over two steps later.
    """

    def train(rounds: LocalRounds, module: nn.Linear, first: int, last: int) -> None:
        for step in range(first, last):
            module.weight.data += 2.0**-step
            finished(rounds.stepped(ends=False))

    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    rounds = rounds_of(module, 4, delay=2, merge=merge)
    train(rounds, module, 0, steps)
    rounds.arrive()
    common, drift = CommonState([rounds]).common_state(), MeanDrift(rounds).own_state()
    rounds.weights.show()
    other.load_state_dict(module.state_dict())
    rounds.weights.hide()
    resumed = rounds_of(other, 4, delay=2, merge=merge)
    CommonState([resumed]).load_common_state(common)
    MeanDrift(resumed).load_own_state(drift)
    train(rounds, module, steps, 16)
    train(resumed, other, steps, 16)
    torch.testing.assert_close(module.weight, other.weight, rtol=0, atol=1e-6)


def test_each_fragment_is_due_once_in_a_round_and_far_enough_from_the_next() -> None:
    for every in range(1, 20):
        for fragments in range(1, every + 1):
            plan = RoundPlan(every, delay=every // fragments - 1, fragments=fragments)
            due = {position: plan.due(position, every) for position in range(1, every + 1)}
            assert [i for each in due.values() for i in each] == list(range(fragments))
            steps = [position for position, each in due.items() if each]
            gaps = [b - a for a, b in zip([steps[-1] - every, *steps], steps, strict=False)]
            assert steps[-1] == every
            assert min(gaps) > plan.delay


def test_fragments_share_all_parameters_evenly() -> None:
    params = {str(i): torch.zeros(size) for i, size in enumerate((1, 50, 1, 1, 40, 3, 2, 2))}
    for number in range(1, 9):
        parts = in_fragments(params, number, OuterSGD())
        assert [n for part in parts for n in part.params] == list(params)
        assert len(parts) == number
        assert all(part.params for part in parts)
    sizes = [part.anchor.numel() for part in in_fragments(params, 2, OuterSGD())]
    assert sizes == [51, 49]
    with pytest.raises(ValueError, match="8 trained parameters; use fragments=8 or fewer"):
        in_fragments(params, 9, OuterSGD())


def test_rounds_grow_as_the_rate_falls_and_not_as_it_rises() -> None:
    """Lengths by the quadratic rule, from the rate of the last step before a round."""
    module = nn.Linear(3, 2)
    rounds = rounds_of(module, GrowingRounds(alpha=0.1, base=2))
    rates = [0.01] * 2 + [0.05] * 2 + [0.05] * 2 + [0.025] * 40
    lengths, begun = [], 0
    for step, rate in enumerate(rates, start=1):
        finished(rounds.stepped(ends=False, rate=rate))
        if rounds.position == 0:
            lengths.append(step - begun)
            begun = step
    # The first; after it; after the rate has risen; after 0.05; after 0.025.
    assert lengths == [2, 2, 2, 4, 16, 16]


def test_another_h_begins_with_the_next_round() -> None:
    module = nn.Linear(3, 2)
    rounds = rounds_of(module, 4)
    lengths, begun = [], 0
    sets = {0: 3, 1: 5, 3: 5, 10: 2}  # before the first step; within a round; again; within one
    for step in range(20):
        if step in sets:
            rounds.set_every(sets[step])
        finished(rounds.stepped(ends=False))
        if rounds.position == 0:
            lengths.append(step + 1 - begun)
            begun = step + 1
    assert lengths == [3, 5, 5, 2, 2, 2]
    with pytest.raises(ValueError, match="every=0"):
        rounds.set_every(0)


def test_a_round_keeps_its_own_h_in_a_checkpoint() -> None:
    """Saved within a round of 3 steps, when a controller has set the next ones to 2."""
    saved, resumed = (rounds_of(nn.Linear(3, 2), 4) for _ in range(2))
    saved.set_every(3)
    finished(saved.stepped(ends=False))
    saved.set_every(2)
    resumed.set_every(2)  # as the controller's state does, which is restored before
    CommonState([resumed]).load_common_state(CommonState([saved]).common_state())
    for rounds in (saved, resumed):
        left = []
        for _ in range(6):
            finished(rounds.stepped(ends=False))
            left.append(rounds.position)
        assert left == [2, 0, 1, 0, 1, 0]


def test_lengths_by_the_formula() -> None:
    rule = GrowingRounds(alpha=0.02, base=4, longest=50)
    assert [rule.length(r, 1.0) for r in (0.5, 0.01, 0.009, 0.004, 0.001, 0.0)] == [
        *(4, 4, 4, 25, 50, 50),
    ]
    assert rule.length(0.001, None) == rule.length(0.001, 0.0005) == 4
    assert GrowingRounds(0.02).length(0.0, 0.1) > 10**9
    for wrong in (
        {"alpha": 0.0},
        {"alpha": 1.0, "base": 0},
        {"alpha": 1.0, "base": 9, "longest": 5},
    ):
        with pytest.raises(ValueError, match=r"GrowingRounds\("):
            GrowingRounds(**wrong)  # type: ignore[arg-type]


def test_a_buffer_that_is_not_finite_costs_no_round() -> None:
    """Rounds are judged by the weights alone."""
    module = nn.Linear(3, 2)
    module.register_buffer("best", torch.tensor(math.inf))
    module.register_buffer("missing", torch.tensor([1.0, math.nan]))
    rounds = rounds_of(module, 1)
    for best in (3.0, 2.0, math.inf, math.nan, 1.0):
        module.best = torch.tensor(best)
        module.weight.data.add_(1.0)
        before = module.weight.detach().clone()
        assert finished(rounds.stepped(ends=False))
        assert torch.equal(module.weight, before)
        torch.testing.assert_close(module.best, torch.tensor(best), equal_nan=True)
