"""One round that is not finite leaves nothing behind in any memory."""

import pytest
import torch

from lightning_gc import QSGD, ErrorFeedback, SignSGD, TopK, TwoShot
from lightning_gc.memories import Memory
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.memory import refused
from lightning_gc.testing.contracts.recovery import SPIKES, Flooding, ordinary, spikes
from tests.support.instances import ALL_MEMORIES


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=cases.label)
def test_no_buffer_of_a_memory_keeps_it(memory: Memory, bad: float) -> None:
    compressor = next(c for c in (TopK(0.1), SignSGD()) if not refused(memory, c))
    lockstep = Lockstep(2, compressor, memory)
    lockstep.step(cases.gradients(2, 0))
    poisoned = cases.gradients(2, 1)
    poisoned[1]["prime"][3] = bad
    assert not cases.flat(lockstep.step(poisoned).mean).isfinite().all()
    for engine in lockstep.engines:
        for kept in engine.state_dict()["memory"].values():
            assert all(buffer.isfinite().all() for buffer in kept.values())
    assert cases.flat(lockstep.step(cases.gradients(2, 2)).mean).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=cases.label)
def test_no_buffer_of_a_memory_overflows(memory: Memory) -> None:
    compressor = next(c for c in (TopK(0.1), SignSGD()) if not refused(memory, c))
    for kind, spike in SPIKES.items():
        lockstep = Lockstep(2, compressor, memory)
        for given in (*spikes(spike, rounds=2, workers=1), *(ordinary(2, s) for s in range(4))):
            lockstep.step(given)
            assert cases.finite_state(lockstep), kind


def test_an_owner_keeps_its_error_where_something_bad_came_in() -> None:
    """In ``TwoShot`` what is left of a worker's own shard is not taken along by another's NaN."""
    lockstep = Lockstep(2, QSGD(4), ErrorFeedback(), TwoShot())
    lockstep.transport = Flooding(2, 1, 0, float("nan"))
    result = lockstep.step([{"w": torch.randn(64, generator=cases.generator(i))} for i in (0, 1)])
    assert result.mean["w"].isnan().all()
    assert result.errors[0]["w"][:32].count_nonzero() > 25
