"""Nothing is lost but what is named: Σ W·mean + errors + lost errors = Σ Δ, over any membership."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc import QSGD, EFSignSGD, ErrorFeedback, PowerSGD, TopK
from lightning_gc.core.flow import resume
from lightning_gc.core.saved_state import each_tensor
from lightning_gc.engine import Engine
from lightning_gc.transports.simulated import Simulated

SHAPES = {"a": (12, 10), "b": (30,)}
NUMEL = 150
COMPRESSORS = (TopK(0.1), QSGD(4), EFSignSGD(), PowerSGD(rank=2))


def total(engine: Engine) -> Tensor:
    """Return a worker's error, flat."""
    engine.loss_scaling.settle()
    errors = engine.errors()
    parts = [errors[n].double().reshape(-1) if n in errors else None for n in SHAPES]
    if any(part is None for part in parts):
        return torch.zeros(NUMEL, dtype=torch.float64)
    return torch.cat([part for part in parts if part is not None])


class Members:
    """Workers of elastic rounds, and the account of what they have sent, kept and lost."""

    def __init__(self, compressor: Any) -> None:
        self.compressor, self.draw = compressor, torch.Generator().manual_seed(0)
        self.engines: dict[int, Engine] = {}
        self.numbers = itertools.count()
        self.round = 0
        self.moved = torch.zeros(NUMEL, dtype=torch.float64)  # Σ Δ
        self.applied = torch.zeros(NUMEL, dtype=torch.float64)  # Σ W·mean
        self.lost = torch.zeros(NUMEL, dtype=torch.float64)

    def join(self) -> None:
        engine = Engine(self.compressor, ErrorFeedback(), seed=0)
        engine.begin_fit(revocable=True)
        engine.rounds.step = self.round
        for donor in list(self.engines.values())[:1]:
            state = donor.compressor_state.items()
            engine.compressor_state = {n: each_tensor(s, Tensor.clone) for n, s in state}
        self.engines[next(self.numbers)] = engine

    def kill(self, number: int) -> None:
        self.lost += total(self.engines.pop(number))

    def leave(self, number: int) -> None:
        """Hand the error over to the lowest of the others."""
        engine = self.engines.pop(number)
        next(iter(self.engines.values())).add_errors(engine.state_dict()["memory"])

    def go(self, broken_after: int | None = None) -> None:
        """Make a round; first an attempt that breaks after so many requests, if any."""
        deltas = [torch.randn(NUMEL, generator=self.draw) for _ in self.engines]
        if broken_after is not None:
            self._attempt(deltas, broken_after)
        means = self._attempt(deltas, None)
        for mean in means[1:]:
            assert torch.equal(mean, means[0])
        for engine in self.engines.values():
            engine.advance()
        self.round += 1
        self.moved += torch.stack(deltas).double().sum(0)
        self.applied += means[0].double() * len(self.engines)

    def _attempt(self, deltas: list[Tensor], broken_after: int | None) -> list[Tensor]:
        sent, flows, kept = [delta.clone() for delta in deltas], [], []
        for rank, (engine, delta) in enumerate(zip(self.engines.values(), sent, strict=True)):
            engine.loss_scaling.settle()
            state = engine.compressor_state.items()
            kept.append({n: each_tensor(s, Tensor.clone) for n, s in state})
            engine.worker, engine.workers = rank, len(sent)
            flows.append(engine.flow(delta, SHAPES))
        transport = Simulated(len(flows))
        if broken_after is None:
            transport.run(flows)
            return sent
        requests: list[Any] = [next(flow, None) for flow in flows]
        for _ in range(broken_after):
            if any(request is None for request in requests):
                break
            replies = transport.fulfil(requests)
            requests = [resume(f, r) for f, r in zip(flows, replies, strict=True)]
        for engine, before in zip(self.engines.values(), kept, strict=True):
            engine.undo(before)
        return sent

    def check(self) -> None:
        present = sum((total(e) for e in self.engines.values()), torch.zeros(NUMEL).double())
        found = self.applied + present + self.lost
        assert (found - self.moved).norm() <= 1e-5 * max(float(self.moved.norm()), 1.0)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(("join", "kill", "leave", "break", "go")), st.integers(0, 3)),
        max_size=8,
    )
)
def test_what_is_lost_has_a_name(compressor: Any, events: Any) -> None:
    members = Members(compressor)
    for _ in range(3):
        members.join()
    members.go()
    for what, which in events:
        numbers = list(members.engines)
        if what == "join":
            members.join()
        elif what in ("kill", "leave") and len(numbers) > 2:
            getattr(members, what)(numbers[which % len(numbers)])
        members.go(broken_after=which if what == "break" else None)
        members.check()


def test_a_repeated_round_has_the_bits_of_one_that_was_not_repeated() -> None:
    plain, repeated = Members(PowerSGD(rank=2)), Members(PowerSGD(rank=2))
    for members, breaks in ((plain, None), (repeated, 1)):
        for _ in range(3):
            members.join()
        for _ in range(3):
            members.go(breaks)
    assert torch.equal(plain.applied, repeated.applied)
    assert torch.equal(total(plain.engines[1]), total(repeated.engines[1]))
