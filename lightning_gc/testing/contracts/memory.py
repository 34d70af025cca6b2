"""The laws of memories, one test each."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gc.compressors import QSGD, Compressor, HardThreshold, RandomK, TopK
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import Memory
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.lockstep import Lockstep


class MemoryContract:
    """Holds memories to what they declare.

    Attributes:
        instances: what to test.
        compressors: what to test them with; those that a memory refuses are left out.

    Example:
        >>> from lightning_gc import Residual
        >>> from lightning_gc.testing.contracts import MemoryContract
        >>> class TestMine(MemoryContract):
        ...     instances = (Residual(decay=0.5),)
    """

    instances: tuple[Memory, ...] = ()
    compressors: tuple[Compressor, ...] = (TopK(0.1), RandomK(0.1), HardThreshold(1.0), QSGD(4))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrise over instances, compressors and numbers of workers."""
        cases.parametrize(
            metafunc,
            memory=self.instances,
            compressor=self.compressors,
            workers=cases.WORKERS,
            dtype=cases.DTYPES,
        )

    def test_1_nothing_is_lost(
        self, memory: Memory, compressor: Compressor, workers: int, dtype: torch.dtype
    ) -> None:
        """Conservation over 20 steps, if declared or if nothing is remembered."""
        if not (memory.conserves or not memory.buffers) or refused(memory, compressor):
            return
        lost = cases.lost(Lockstep(workers, compressor, memory), 20, dtype)
        assert lost < cases.TOLERANCE[dtype]

    def test_2_gradient_is_left_alone(self, memory: Memory) -> None:
        """``compensate`` changes the gradient only if it returns it."""
        grad = torch.randn(19, generator=cases.generator(0))
        before = grad.clone()
        bucket = cases.bucket_of(grad)
        state = {name: torch.ones(19) for name in memory.buffers}
        buffer = memory.compensate(bucket, state)
        assert torch.equal(grad, before)
        assert buffer is (state[memory.buffers[0]] if memory.buffers else grad)

    def test_3_zeros_stay_zeros(self, memory: Memory) -> None:
        """No gradient and no error: nothing to compress."""
        bucket = cases.bucket_of(torch.zeros(19))
        state = {name: torch.zeros(19) for name in memory.buffers}
        assert not memory.compensate(bucket, state).any()

    def test_state_survives_a_round_trip(self, memory: Memory, compressor: Compressor) -> None:
        """After saving and loading, the next step is the same bit for bit."""
        if refused(memory, compressor):
            return
        straight, resumed = (Lockstep(2, compressor, memory) for _ in range(2))
        for step in range(3):
            straight.step(cases.gradients(2, step))
        for old, new in zip(straight.engines, resumed.engines, strict=True):
            new.load_state_dict(old.state_dict())
        results = [run.step(cases.gradients(2, 3)) for run in (straight, resumed)]
        assert torch.equal(cases.flat(results[0].mean), cases.flat(results[1].mean))
        for one, other in zip(results[0].errors, results[1].errors, strict=True):
            assert torch.equal(cases.flat(one), cases.flat(other))


def refused(memory: Memory, compressor: Compressor) -> bool:
    """Return whether the two cannot be combined."""
    try:
        combine(compressor, memory)
    except ValueError:
        return True
    return False
