"""Kernels that factor all matrices of a bucket do what torch's operations do, up to rounding."""

import math

import pytest
import torch
from torch import Tensor

from lightning_gc import ErrorFeedback, GradZip, NoMemory, PerParameter, PowerSGD
from lightning_gc.compressors import Compressor
from lightning_gc.engine import Engine
from lightning_gc.kernels.low_rank import Factors, Side, kernels_for
from lightning_gc.memories import Memory
from lightning_gc.transports.simulated import Simulated
from tests.support.bucket_kernels import KINDS, gradient, without_kernels
from tests.support.kernel_device import DEVICE, INTERPRETED, here, same, some

pytestmark = pytest.mark.usefixtures("poisoned", "fused_once")
SHAPES = [(30, 40), (7,), (0, 5), (33, 3, 11), (1,), (2, 300), (130, 5), (12, 20), (12, 20)]
"""Wide, tall, of one shape, of two rows; others are sent uncompressed."""
KERNELS = kernels_for(torch.ones(1, device=DEVICE), 2)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="needs triton or numba")
quiet = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
"""The interpreter computes with numpy, which warns of what floats do."""


def train(
    compressor: Compressor, kind: str, *, workers: int, memory: Memory | None, steps: int = 3
) -> list[list[Tensor]]:
    """Return, for each step and worker, the mean, the errors and what was to be sent."""
    engines = [Engine(compressor, memory, worker=w, workers=workers) for w in range(workers)]
    named = {f"p{i}": shape for i, shape in enumerate(SHAPES)}
    found = []
    for step in range(steps):
        before = [flat(engine) for engine in engines]
        grads = [here(gradient(kind, SHAPES, worker, step)) for worker in range(workers)]
        given = [grad.cpu().clone() for grad in grads]
        flows = [engine.flow(g, named) for engine, g in zip(engines, grads, strict=True)]
        Simulated(workers).run(flows)
        for engine, grad, own, left in zip(engines, grads, given, before, strict=True):
            found.append([grad.cpu(), flat(engine), own + left])
            engine.advance()
    return found


def flat(engine: Engine) -> Tensor:
    numel = sum(map(math.prod, SHAPES))
    parts = [error.cpu().reshape(-1) for error in engine.errors().values()]
    return torch.cat(parts) if parts else torch.zeros(numel)


@needs_kernels
@quiet
@pytest.mark.parametrize("kind", some(KINDS, KINDS))
@pytest.mark.parametrize("case", some([(1, 1), (2, 2), (3, 3), (2, 5)], [(2, 2), (3, 3)]))
def test_as_torch_does(kind: str, case: tuple[int, int]) -> None:
    """Means and errors of three steps, not finite where torch's are not."""
    workers, rank = case
    compressor = PerParameter(PowerSGD(rank, min_ratio=0.5))
    ours = train(compressor, kind, workers=workers, memory=None)
    with without_kernels():
        theirs = train(compressor, kind, workers=workers, memory=None)
    for mine, others in zip(ours, theirs, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            known = a.isfinite()
            scale = float(others[2][others[2].isfinite()].abs().max())
            torch.testing.assert_close(a[known], b[known], rtol=1e-3, atol=2e-3 * scale)
