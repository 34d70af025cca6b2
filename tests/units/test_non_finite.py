"""One round that is not finite leaves nothing behind in any memory."""

import pytest

from lightning_gc import Memory, SignSGD, TopK
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.memory import refused
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
