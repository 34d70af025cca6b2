"""Whole exchanges give the same result with kernels as without."""

import pytest
import torch

from lightning_gc import QSGD, AllGather, HardThreshold, TopK, TwoShot
from lightning_gc.kernels import dispatch
from lightning_gc.testing import Lockstep
from tests.support.bucket_kernels import without_kernels
from tests.support.kernel_device import DEVICE, here, marks, same, tensors

pytestmark = marks


def gradients(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"weight": (50, 61), "bias": (61,), "one": (1,)}
    return [
        {name: here(torch.randn(s, generator=generator)) for name, s in shapes.items()}
        for _ in range(2)
    ]


@pytest.mark.parametrize("scheme", [AllGather(), TwoShot()], ids=repr)
@pytest.mark.parametrize(
    "codec", [HardThreshold(1.5), TopK(0.1), TopK(0.05, selection="sampled")], ids=repr
)
def test_the_same_run(codec, scheme) -> None:
    """Means and errors of several steps, bit for bit."""
    with_kernels, without = (Lockstep(2, codec, scheme=scheme) for _ in range(2))
    for step in range(3):
        ours = with_kernels.step(gradients(step))
        with without_kernels():
            theirs = without.step(gradients(step))
        assert ours.wire_bytes == theirs.wire_bytes
        for name, mean in ours.mean.items():
            assert same(mean, theirs.mean[name])
            for a, b in zip(ours.errors, theirs.errors, strict=True):
                assert same(a[name], b[name])


@pytest.mark.parametrize("codec", [QSGD(2, 64), QSGD(4), QSGD(9, 100, "l2")], ids=repr)
def test_qsgd_loses_nothing(codec: QSGD) -> None:
    """Its random numbers are the kernel's own, so runs differ; what adds up does not."""
    from lightning_gc.testing.contracts import cases

    for name in ("normal", "zeros", "constant", "sparse", "tiny"):
        x = here(tensors(2000)[name])
        left, sent = x.clone(), torch.zeros_like(x)
        payload = codec.encode(left, cases.bucket_of(x))
        codec.decode(payload, sent, 1.0, cases.bucket_of(x))
        assert torch.allclose(left + sent, x, rtol=1e-6, atol=float(x.abs().max()) * 1e-6)
        assert all(part.isfinite().all() for part in (left, sent))


def test_where_kernels_run() -> None:
    assert dispatch.fused(torch.ones(1, device=DEVICE), "levels")
    assert not dispatch.fused(torch.ones(0, device=DEVICE), "levels")
    assert not dispatch.fused(torch.ones(4, device=DEVICE, dtype=torch.float64), "levels")
    assert not dispatch.fused(torch.ones(4, device=DEVICE)[::2], "levels")
    assert not dispatch.fused(torch.ones(4, device="meta"), "levels")
