"""A steady step allocates nothing of the gradient's size: new memory costs page faults."""

import tracemalloc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gc import QSGD, Cast, HardThreshold, Identity, PowerSGD, TopK
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.engine.engine import Engine
from lightning_gc.transports.simulated import Simulated

SHAPES = {"embedding": (5_000, 300), "matrix": (1_000, 600), "bias": (1_000,)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())


class Allocations(TorchDispatchMode):
    """Records the bytes of all storage that operators return and were not given."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.nbytes += [t.untyped_storage().nbytes() for t in made if _address(t) not in given]
        return result


def _address(leaf):
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else None


def step(engines, grads):
    flows = [engine.flow(grad, SHAPES) for engine, grad in zip(engines, grads, strict=True)]
    Simulated(len(engines)).run(flows)
    for engine in engines:
        engine.advance()


def largest_allocation(compressor):
    """Return the largest of two workers' third step, in multiples of the gradient."""
    engines = [Engine(by_default(compressor), worker=i, workers=2) for i in range(2)]
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        with Allocations():  # which imports something when it is used first
            step(engines, [torch.randn(NUMEL, generator=draw) for _ in engines])
    grads = [torch.randn(NUMEL, generator=draw) for _ in engines]
    tracemalloc.start()
    with Allocations() as seen:
        step(engines, grads)
    of_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return max(*seen.nbytes, of_numpy) / (4 * NUMEL)


# The largest is the payload; of sparsifiers, what is made of a piece that fits into the cache.
@pytest.mark.parametrize(
    ("compressor", "limit"),
    [
        (Identity(), 0.01),
        (TopK(0.01), 0.2),
        (TopK(0.01, "bfloat16", "sampled"), 0.2),
        (HardThreshold(5.0), 0.2),
        (QSGD(4), 0.15),
        (Cast(), 0.51),
        (PowerSGD(2), 0.1),
    ],
    ids=repr,
)
def test_nothing_of_the_gradients_size(compressor, limit):
    assert largest_allocation(compressor) < limit


def test_a_copy_of_the_gradient_would_be_seen(monkeypatch):
    whole = Engine.flow

    def copies(self, grad, *args, **kwargs):
        return whole(self, grad.clone(), *args, **kwargs)

    monkeypatch.setattr(Engine, "flow", copies)
    assert largest_allocation(QSGD(4)) >= 1
