"""Old names of random-k and TernGrad equal their family's class with the fields set."""

import pytest
import torch

from lightning_gc import (
    QSGD,
    IndependentRandomK,
    IndependentRandomMask,
    IndependentTernGrad,
    IndependentUnbiasedRandomK,
    RandomK,
    RandomMask,
    TernGrad,
    UnbiasedRandomK,
    Uniform,
)
from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases

SAME: list[tuple[Compressor, Compressor]] = [
    (UnbiasedRandomK(0.3), RandomK(0.3, unbiased=True)),
    (IndependentRandomK(0.3), RandomK(0.3, shared=False)),
    (IndependentUnbiasedRandomK(0.3), RandomK(0.3, unbiased=True, shared=False)),
    (IndependentRandomMask(0.3), RandomMask(0.3, shared=False)),
    (IndependentTernGrad(1.5), TernGrad(1.5, shared=False)),
    (QSGD(5, 64, "l2"), Uniform(5, "stochastic", 64, "l2")),
]


@pytest.mark.parametrize(("old", "new"), SAME, ids=repr)
def test_same_bits_and_bytes(old: Compressor, new: Compressor) -> None:
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


def test_texts_are_those_of_version_0_1() -> None:
    """Checkpoints compare them: a default of a later field is left out."""
    assert [repr(c) for c in (RandomK(), RandomMask(0.2), TernGrad())] == [
        "RandomK(density=0.01)",
        "RandomMask(density=0.2)",
        "TernGrad(clip=2.5)",
    ]
    assert repr(RandomK(0.2, shared=False)) == "RandomK(density=0.2, shared=False)"
    assert repr(TernGrad(None, shared=False)) == "TernGrad(clip=None, shared=False)"
