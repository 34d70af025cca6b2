"""Rounds of one worker, whose exchange is answered at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gc import NoMemory, OuterSGD, PerParameter, TopK
from lightning_gc.local_steps.fragment import in_fragments
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.synchronizer.configuration import configure
from lightning_gc.synchronizer.local_rounds import LOST_IN_A_ROW, LocalRounds
from lightning_gc.synchronizer.workers import Workers
from lightning_gc.transports import Simulated


class Alone:
    """In the place of a synchronizer: one worker, and nothing runs in the background."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        account: Any = SimpleNamespace(worker=0, workers=1, timing=False, sent_bytes=0)
        workers.start([account], revocable=True)

    def submit(self, grad: torch.Tensor, shapes: Any) -> Any:
        Simulated(1).run([self.workers.first.flow(grad, shapes)])
        return self.run(iter(()), grad)

    def run(self, flow: Any, result: torch.Tensor) -> Any:
        for _ in flow:
            raise AssertionError("no buffers here")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    def end_round(self, common: Any) -> None:
        self.workers.end_round([])

    def check(self) -> None:
        pass


def rounds_of(module: nn.Module, every: int) -> LocalRounds:
    workers = Workers(configure("a test", PerParameter(TopK(1.0)), NoMemory(), None, 0))
    workers.name(module)
    alone: Any = Alone(workers)
    return LocalRounds(module, workers, alone, RoundPlan("a test", every), OuterSGD())


def test_too_many_lost_rounds_end_the_run() -> None:
    """Each is warned of; a finite one between them starts the count anew."""
    module = nn.Linear(3, 2)
    rounds = rounds_of(module, 2)
    (weights,) = rounds.weights.fragments
    start = weights.anchor.clone()

    def lose() -> None:
        for _ in range(2):
            module.weight.data.fill_(float("nan"))
            kept = rounds.after_step(ends=False)
        assert not kept
        assert torch.equal(weights.weights(), start)

    for _ in range(LOST_IN_A_ROW - 1):
        with pytest.warns(UserWarning, match="its 2 steps are lost"):
            lose()
    assert rounds.after_step(ends=True), "a round of one step"
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
    rounds.after_step(ends=False)
    for _ in range(2):  # the second has no effect
        rounds.weights.show()
        assert torch.equal(weights.weights(), start)
    named, _ = rounds.weights.own()
    assert torch.equal(torch.cat([t.view(-1) for t in named.values()]), own)
    for _ in range(2):
        rounds.weights.hide()
        assert torch.equal(weights.weights(), own)


def test_each_fragment_is_due_once_in_a_round_and_far_enough_from_the_next() -> None:
    for every in range(1, 20):
        for fragments in range(1, every + 1):
            plan = RoundPlan("a test", every, fragments, delay=every // fragments - 1)
            due = {position: plan.due(position) for position in range(1, every + 1)}
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
