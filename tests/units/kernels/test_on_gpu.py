"""On a GPU, kernels never make the host wait, and handle sizes that fill it."""

import pytest
import torch

from lightning_gc.coding import payload_validation
from lightning_gc.kernels import accumulate, dequantise, quantise, select
from tests.support.kernel_device import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUMEL = 5_000_003


def passes(x: torch.Tensor, noise: torch.Tensor, fused: bool) -> list[torch.Tensor]:
    """Each pass once, one after the other; returns all that was made or changed."""
    pick = ["select", "quantise", "dequantise", "accumulate"] if fused else ["reference"] * 4
    error, out, buffer = torch.zeros_like(x), torch.zeros_like(x), x.clone()
    threshold = x.abs().mean() * 2.5
    found = getattr(select, pick[0])(x.bfloat16(), error, threshold, 600_000)
    norms = quantise.in_blocks(buffer, 512).abs().amax(1)
    packed = getattr(quantise, pick[1])(buffer, norms, 512, 5, noise)
    getattr(dequantise, pick[2])(packed, norms, 512, 5, out, 1 / 3, payload_validation.codes)
    positions, values = torch.arange(0, NUMEL, 7, device=x.device), buffer[::7].contiguous()
    getattr(accumulate, pick[3])(out, positions, values, 1 / 3)
    return [*found, error, packed, buffer, out]


def test_the_same_without_the_host_waiting() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(NUMEL, device="cuda", generator=generator)
    noise = torch.rand(-(-NUMEL // 512) * 512, device="cuda", generator=generator)
    first = passes(x, noise, fused=True)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = passes(x, noise, fused=True)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    wanted = passes(x, noise, fused=False)
    assert int(wanted[2]) < 600_000
    for a, b, c in zip(first, again, wanted, strict=True):
        assert same(a, b)
        assert same(a, c)
