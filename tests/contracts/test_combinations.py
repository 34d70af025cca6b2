"""Any allowed compressor, memory and scheme together keep replicas equal and lose no gradient."""

from collections.abc import Sequence

import pytest
import torch

from lightning_gc import MEMORIES, Hierarchical, TwoHop
from lightning_gc.compressors import Collective, Compressor
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.memory import refused
from lightning_gc.testing.contracts.scheme import fits
from tests.support.instances import ALL, ALL_MEMORIES, FIRST, ONE_EACH, schemes_for

STEPS = 2
SMALL = ("matrix", "smaller_than_workers")


def small(workers: int, step: int) -> list[cases.Named]:
    return [{n: g[n] for n in g if n in SMALL} for g in cases.gradients(workers, step)]


def hold(
    compressor: Compressor, memory: Memory, scheme: Scheme | None, workers: int, steps: int
) -> None:
    """Replicas are the same (``Lockstep`` says where not), numbers finite, and nothing is lost."""
    what = f"{memory} {scheme} {workers}"
    lockstep = Lockstep(workers, compressor, memory, scheme)
    applied = {n: torch.zeros(cases.SHAPES[n], dtype=torch.float64) for n in SMALL}
    given = {n: torch.zeros_like(applied[n]) for n in SMALL}
    for step in range(steps):
        made = small(workers, step)
        result = lockstep.step(made)
        for n in SMALL:
            assert result.mean[n].isfinite().all(), what
            applied[n] += result.mean[n].double()
            given[n] += torch.stack([g[n].double() for g in made]).mean(0)
    if memory.conserves and memory.buffers:
        for n in SMALL:
            left = torch.stack([error[n].double() for error in result.errors]).mean(0)
            slack = 1e-4 * float(given[n].abs().max() + left.abs().max())
            torch.testing.assert_close(applied[n] + left, given[n], rtol=0, atol=slack, msg=what)


@pytest.mark.parametrize("compressor", ONE_EACH, ids=cases.label)
def test_all_that_go_together(compressor: Compressor) -> None:
    """Of each class its first example; three workers, whose shards differ in length."""
    hold_all(compressor, [cls.examples()[0] for cls in MEMORIES.values()], (3,), STEPS)


@pytest.mark.nightly
@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_all_that_go_together_at_length(compressor: Compressor) -> None:
    hold_all(compressor, ALL_MEMORIES, cases.WORKERS, steps=6)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", [TwoHop(2), Hierarchical(2)], ids=str)
@pytest.mark.parametrize("compressor", FIRST, ids=cases.label)
def test_two_nodes_of_two(compressor: Compressor, scheme: Scheme) -> None:
    """Each compressor that the scheme takes, with each memory that goes with it."""
    if isinstance(compressor.method, Collective) or not fits(scheme, compressor):
        return
    for memory in ALL_MEMORIES:
        try:
            combine(compressor, memory, scheme)
        except ValueError:
            continue  # as `refused`, by the scheme too
        hold(compressor, memory, scheme, 4, steps=4)


def hold_all(
    compressor: Compressor, memories: Sequence[Memory], numbers: Sequence[int], steps: int
) -> None:
    for memory in memories:
        if refused(memory, compressor):
            continue
        for scheme in schemes_for(compressor):
            for workers in numbers:
                hold(compressor, memory, scheme, workers, steps)


def test_every_memory_goes_with_something() -> None:
    for memory in ALL_MEMORIES:
        assert any(not refused(memory, compressor) for compressor in ALL), memory
    assert len({combine(c)[1] for c in ALL}) > 3
