"""Presets equal their family's class with the fields set; texts leave out defaults."""

import torch

from lightning_gc import QSGD, RandomK, RandomMask, TernGrad, Uniform
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases


def test_qsgd_has_the_bits_and_bytes_of_its_family() -> None:
    old, new = QSGD(5, 64, "l2"), Uniform(5, "stochastic", 64, "l2")
    assert (old.traits, old.wire(100), old.bound(100)) == (
        new.traits,
        new.wire(100),
        new.bound(100),
    )
    one, other = (Lockstep(3, compressor) for compressor in (old, new))
    for step in range(2):
        gradients = cases.gradients(3, step)
        first, second = one.step(gradients), other.step(gradients)
        assert first.wire_bytes == second.wire_bytes
        for name, mean in first.mean.items():
            assert torch.equal(mean, second.mean[name])
            for left, right in zip(first.errors, second.errors, strict=True):
                assert torch.equal(left[name], right[name])


def test_texts_leave_out_defaults() -> None:
    """Checkpoints compare them."""
    assert [repr(c) for c in (RandomK(), RandomMask(0.2), TernGrad())] == [
        "RandomK(density=0.01)",
        "RandomMask(density=0.2)",
        "TernGrad(clip=2.5)",
    ]
    assert repr(RandomK(0.2, shared=False)) == "RandomK(density=0.2, shared=False)"
    assert repr(TernGrad(None, shared=False)) == "TernGrad(clip=None, shared=False)"
