"""On a GPU, no kernel makes the host wait; all handle sizes that fill it."""

import pytest
import torch

from lightning_gc.core import payload_validation
from lightning_gc.kernels import accumulate, quantise
from tests.support.kernel_device import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUMEL = 5_000_003


def passes(x: torch.Tensor, noise: torch.Tensor, fused: bool) -> list[torch.Tensor]:
    """Each pass once, one after the other; returns all that was made or changed."""
    pick = ["quantise", "dequantise", "accumulate"]
    if not fused:
        pick = ["quantise_reference", "dequantise_reference", "reference"]
    out, buffer = torch.zeros_like(x), x.clone()
    norms = quantise.in_blocks(buffer, 512).abs().amax(1)
    packed = getattr(quantise, pick[0])(buffer, norms, 512, 5, noise)
    getattr(quantise, pick[1])(packed, norms, 512, 5, out, 1 / 3, payload_validation.codes)
    positions, values = torch.arange(0, NUMEL, 7, device=x.device), buffer[::7].contiguous()
    getattr(accumulate, pick[2])(out, positions, values, 1 / 3)
    return [packed, buffer, out]


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
    for a, b, c in zip(first, again, wanted, strict=True):
        assert same(a, b)
        assert same(a, c)
