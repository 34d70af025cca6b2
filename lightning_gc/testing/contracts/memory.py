"""Test the laws of memories, one test each (MemoryContract)."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import QSGD, Compressor, HardThreshold, RandomK, TopK
from lightning_gc.core import Bucket, Reply, Request
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import Memory
from lightning_gc.memories.storage import Storage
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.cases import broken, telling, unequal
from lightning_gc.testing.lockstep import Lockstep
from lightning_gc.transports.simulated import Simulated


class MemoryContract:
    """Tests memories against their declarations.

    Attributes:
        instances: memories to test.
        compressors: to combine them with; refused combinations are left out.

    Example:
        >>> from lightning_gc import ErrorFeedback
        >>> from lightning_gc.testing.contracts import MemoryContract
        >>> class TestMine(MemoryContract):
        ...     instances = (ErrorFeedback(decay=0.5),)
    """

    instances: tuple[Memory, ...] = ()
    compressors: tuple[Compressor, ...] = (TopK(0.1), RandomK(0.1), HardThreshold(1.0), QSGD(4))

    def pytest_generate_tests(self, metafunc: Any) -> None:
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
        """Conservation over 20 steps, if declared or without buffers."""
        if not (memory.conserves or not memory.buffers) or refused(memory, compressor):
            return
        on = f"{compressor!r} and {workers} workers in {dtype}"
        with telling(memory, "law 1", on):
            lost = cases.lost(Lockstep(workers, compressor, memory), 20, dtype)
        what = f"after 20 steps {lost:.2g} of the gradient is neither applied nor in the error"
        assert lost < cases.TOLERANCE[dtype], broken(memory, "law 1", what, on)

    def test_2_gradient_is_left_alone(self, memory: Memory) -> None:
        """``flow`` does not change the gradient, except by the exchange."""
        grad = torch.randn(19, generator=cases.generator(0))
        before = grad.clone()
        state = {name: torch.ones(19) for name in memory.buffers}
        exchanged = run(memory, cases.bucket_of(grad), state)
        what = f"flow changed the gradient: {unequal(grad, before)}"
        assert torch.equal(grad, before), broken(memory, "law 2", what)
        first = repr(memory.buffers[0]) if memory.buffers else "the gradient"
        what = f"what it exchanges is not {first}, as its buffers {memory.buffers!r} say"
        is_first = exchanged is (state[memory.buffers[0]] if memory.buffers else grad)
        assert is_first, broken(memory, "law 2", what)

    def test_3_zeros_stay_zeros(self, memory: Memory) -> None:
        state = {name: torch.zeros(19) for name in memory.buffers}
        sent = run(memory, cases.bucket_of(torch.zeros(19)), state)
        what = f"it exchanges up to {float(sent.abs().max()):.2g}"
        assert not sent.any(), broken(memory, "law 3", what, "zero gradients and a zero state")

    def test_4_what_is_stored_in_fewer_bits(self, memory: Memory) -> None:
        """Rounded by less than a step, without bias; what has been restored stays as it is."""
        if memory.stored is None:
            return
        storage = memory.stored
        for kind, x in cases.tensors(storage.padded(200)).items():
            once = stored(storage, x, 0)
            over = (once - x).abs() >= storage.step(x).clamp_min(torch.finfo(x.dtype).tiny)
            what = f"storing moves {int(over.sum())} of {x.numel()} elements by a step or more"
            assert not over.any(), broken(memory, "law 4", what, repr(kind))
            for word in (0, 1, 65534, 65535):
                words = torch.full((x.numel(),), word, dtype=torch.int32)
                gap = unequal(storage.restored(storage.rounded(once, words)), once)
                what = f"storing what has been restored changes it: {gap}"
                assert gap is None, broken(memory, "law 4", what, f"{kind!r}, random word {word}")
        x = cases.tensors(storage.padded(200))["normal"]
        fair = cases.unbiased(lambda seed: stored(storage, x, seed), x, 400)
        what = "the mean of 400 that were stored is not what was stored, by over 4 sigma"
        assert fair, broken(memory, "law 4", what)

    def test_state_survives_a_round_trip(self, memory: Memory, compressor: Compressor) -> None:
        if refused(memory, compressor):
            return
        straight, resumed = (Lockstep(2, compressor, memory) for _ in range(2))
        for step in range(3):
            straight.step(cases.gradients(2, step))
        for old, new in zip(straight.engines, resumed.engines, strict=True):
            new.load_state_dict(old.state_dict())
        results = [run.step(cases.gradients(2, 3)) for run in (straight, resumed)]
        states = "what states keep"
        gap = unequal(cases.flat(results[1].mean), cases.flat(results[0].mean))
        what = f"the step after loading a state has another mean: {gap}"
        assert gap is None, broken(memory, states, what, repr(compressor))
        for one, other in zip(results[0].errors, results[1].errors, strict=True):
            gap = unequal(cases.flat(other), cases.flat(one))
            what = f"the step after loading a state leaves another error: {gap}"
            assert gap is None, broken(memory, states, what, repr(compressor))


def refused(memory: Memory, compressor: Compressor) -> bool:
    """Return whether the two cannot be combined."""
    try:
        combine(compressor, memory)
    except ValueError:
        return True
    return False


def stored(storage: Storage, x: Tensor, seed: int) -> Tensor:
    """Return ``x`` as it is after it has been stored."""
    kept = storage.zeros(x.numel(), x.device)
    storage.store(x, kept, seed)
    return storage.restored(kept)


def run(memory: Memory, bucket: Bucket, state: dict[str, Tensor]) -> Tensor:
    """Run a memory's flow for a worker alone, with a fake exchange; return what it exchanged."""

    class Exchanged:
        def __init__(self) -> None:
            self.buffers: list[Tensor] = []

        def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
            self.buffers.append(buffer)
            yield from ()
            return torch.zeros_like(buffer)

        def feedback(
            self, error: Tensor, decay: float = 1.0, gain: float = 1.0
        ) -> Generator[Request, Reply, Tensor]:
            return self(error.mul_(decay).add_(bucket.grad, alpha=gain))

        dense = __call__

    exchange = Exchanged()
    Simulated(1).run([memory.flow(bucket, state, exchange)])
    what = f"flow calls exchange {len(exchange.buffers)} times, where once is asked"
    assert len(exchange.buffers) == 1, broken(memory, "law 2", what)
    return exchange.buffers[0]
