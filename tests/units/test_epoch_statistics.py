"""Sums over an epoch do not depend on how narrow gradients are."""

import pytest
import torch

from lightning_gc.core.bucket import Bucket
from lightning_gc.engine.statistics import EpochStatistics

NUMEL, STEPS = 70_000, 5  # more than one piece


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 3000.0)],
)
def test_squares_of_narrow_gradients(dtype: torch.dtype, scale: float) -> None:
    """The norm of the last case, 8e5, is more than float16 can hold."""
    draw = torch.Generator().manual_seed(0)
    kept, expected = EpochStatistics("epoch sum", moments=True, scale=True), 0.0
    for step in range(STEPS):
        grad = (scale * torch.randn(NUMEL, generator=draw)).to(dtype)
        expected += float(grad.double().square().sum())
        kept.see_gradient(Bucket(grad, {"w": (NUMEL,)}, step=step))
    assert kept.squares() == pytest.approx(expected, rel=5e-5)
    assert kept.squared_gradients == pytest.approx(expected, rel=5e-5)
