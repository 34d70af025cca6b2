"""With local steps too nothing is lost, and all workers get the same common weights.

Over every compressor and memory that goes with local steps; by day one of each kind.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_gc import (
    QSGD,
    EFSignSGD,
    ErrorFeedback,
    HardThreshold,
    Identity,
    NoMemory,
    OuterSGD,
    PowerSGD,
    Quantised,
    SparseReduce,
    TopK,
)
from lightning_gc.compressors import Compressor
from lightning_gc.engine.compatibility import combine
from lightning_gc.local_steps import RoundPlan
from lightning_gc.memories import GlobalMomentum, LocalMomentum, Memory, MomentumCorrection
from lightning_gc.schemes import Scheme
from lightning_gc.testing import LocalLockstep
from lightning_gc.testing.contracts import cases
from tests.support.instances import ALL, ONE_MEMORY_EACH, schemes_for

ROUNDS = 50
SHAPES = {"matrix": (20, 15), "bias": (19,), "scalar": ()}
FEW: tuple[tuple[Compressor, Memory, Scheme | None], ...] = (
    (TopK(0.1), ErrorFeedback(), None),
    (TopK(0.1), ErrorFeedback(), SparseReduce()),
    (Quantised(TopK(0.1), QSGD(4)), ErrorFeedback(), None),
    (QSGD(4), NoMemory(), None),
    (EFSignSGD(), ErrorFeedback(), None),
    (PowerSGD(1), ErrorFeedback(), None),
    (HardThreshold(0.05), ErrorFeedback(), None),
    (Identity(), NoMemory(), None),
)


def fits(compressor: Compressor, memory: Memory) -> bool:
    try:
        combine(compressor, memory)
        RoundPlan().check(compressor, memory, None)
    except ValueError:
        return False
    return True


def moved(weights: dict[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
    """Return weights after some steps of this worker."""
    g = cases.generator(1000 * step + worker)
    return {n: t - 0.03 * torch.randn(t.shape, generator=g) for n, t in weights.items()}


def hold(
    compressor: Compressor, memory: Memory, scheme: Scheme | None, workers: int, rounds: int
) -> None:
    """What was applied and what is left are what workers have come; ``Lockstep`` compares bits."""
    start = moved({n: torch.zeros(s) for n, s in SHAPES.items()}, 0, 10**6)
    lockstep = LocalLockstep(workers, start, compressor, memory, scheme)
    come = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    dropped = {n: torch.zeros_like(come[n]) for n in SHAPES}
    largest = 0.0  # of what was rounded to float32: errors of unbiased methods grow, if fed back
    for step in range(rounds):
        own = [moved(lockstep.weights, worker, step) for worker in range(workers)]
        for n in SHAPES:
            common = lockstep.weights[n].double()
            come[n] += torch.stack([common - each[n].double() for each in own]).mean(0)
        done = lockstep.round(own)
        assert not done.lost
        for n in SHAPES:
            left = torch.stack([error[n].double() for error in done.errors]).mean(0)
            dropped[n] = left if memory.buffers else dropped[n] + left
        largest = max(largest, *(float(flat(each).norm()) for each in (*done.errors, done.weights)))
    assert all(done.weights[n].isfinite().all() for n in SHAPES)
    if memory.conserves:
        gone = {n: start[n].double() - done.weights[n].double() for n in SHAPES}
        gap = flat({n: gone[n] + dropped[n] - come[n] for n in SHAPES})
        size = max(largest, float(flat(come).norm()), float(flat(start).norm()))
        assert float(gap.norm()) / size < 1e-6, (compressor, memory, scheme, workers)


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[n].double().reshape(-1) for n in SHAPES])


@pytest.mark.parametrize(("compressor", "memory", "scheme"), FEW, ids=cases.label)
def test_nothing_is_lost_in_fifty_rounds(
    compressor: Compressor, memory: Memory, scheme: Scheme | None
) -> None:
    hold(compressor, memory, scheme, 3, ROUNDS)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_nothing_is_lost_whatever_is_combined(compressor: Compressor) -> None:
    memories: Sequence[Memory] = [m for m in ONE_MEMORY_EACH if fits(compressor, m)]
    assert memories or not compressor.traits.conserves
    for memory in memories:
        for scheme in schemes_for(compressor):
            hold(compressor, memory, scheme, 3, ROUNDS)


def test_memories_with_momentum_are_outer_momentum() -> None:
    """They go with an outer step without; the optimizer within the round may have its own."""
    for memory in (MomentumCorrection(0.9), GlobalMomentum(0.9), LocalMomentum(0.9)):
        assert fits(TopK(0.1), memory)
        with pytest.raises(ValueError, match="the memory has the outer momentum"):
            RoundPlan(outer=OuterSGD.diloco()).check(TopK(0.1), memory, None)
    RoundPlan(outer=OuterSGD.diloco()).check(TopK(0.1), ErrorFeedback(), None)
