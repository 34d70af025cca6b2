"""Nothing is lost where a worker without a gradient encodes a shard for all."""

from typing import Any

import pytest
import torch

from lightning_gc import (
    QSGD,
    AllGather,
    ErrorFeedback,
    GlobalMomentum,
    MomentumCorrection,
    TopK,
    TwoHop,
    TwoShot,
    WeightedError,
)
from lightning_gc.testing import Lockstep

WORKERS, STEPS, NUMEL = 4, 6, 300


@pytest.mark.parametrize("compressor", [TopK(0.1), QSGD(4)], ids=str)
@pytest.mark.parametrize("memory", [ErrorFeedback(), WeightedError(1.0, 1.0)], ids=str)
@pytest.mark.parametrize("scheme", [AllGather(), TwoShot(), TwoHop(2)], ids=str)
def test_what_is_applied_and_what_is_left_is_the_gradient(
    compressor: Any, memory: Any, scheme: Any
) -> None:
    lockstep = Lockstep(WORKERS, compressor, memory, scheme)
    draw, given, applied = torch.Generator().manual_seed(1), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(STEPS):
        grads = [torch.randn(NUMEL, generator=draw) for _ in range(WORKERS)]
        if step in (2, 3):
            grads[step - 2].zero_()
        given += sum(grads) / WORKERS
        result = lockstep.step([{"w": grad} for grad in grads])
        applied += result.mean["w"]
    left = sum(errors["w"] for errors in result.errors) / WORKERS
    torch.testing.assert_close(applied + left, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("compressor", "memory"),
    [
        (TopK(0.1), MomentumCorrection(0.9, masking="none")),
        (QSGD(4), GlobalMomentum(0.9)),
        (QSGD(4), WeightedError(0.4, 0.6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", [TwoShot(), TwoHop(2)], ids=str)
def test_an_owner_without_a_gradient_books_what_it_leaves(
    compressor: Any, memory: Any, scheme: Any
) -> None:
    """Of one step with no errors before it: workers' sums of what is applied and left are alike."""
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(NUMEL, generator=draw) for _ in range(WORKERS)]
    grads[0].zero_()
    idle, scale = (Lockstep(WORKERS, compressor, memory, s) for s in (scheme, AllGather()))
    found = []
    for lockstep in (idle, scale):
        result = lockstep.step([{"w": grad.clone()} for grad in grads])
        left = sum(errors["w"] for errors in result.errors) / WORKERS
        found.append(result.mean["w"] + left)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
