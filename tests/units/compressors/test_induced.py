"""Induced sends both parts, is unbiased, and has the variance that it declares."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import (
    QSGD,
    HardThreshold,
    Identity,
    Induced,
    PerParameter,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
    VarianceCriterion,
)
from lightning_gc.compressors import AbsoluteError, Variance
from lightning_gc.testing import Lockstep
from tests.support.codecs import KINDS, apply, each_kind

CODEC = Induced(TopK(0.1), QSGD(3, 64))


@each_kind
def test_the_largest_exactly_and_the_others_rounded(kind: str) -> None:
    x = KINDS[kind].numpy()
    sent, left, payload = apply(CODEC, KINDS[kind])
    largest = np.argsort(-np.abs(x), kind="stable")[:30]
    if kind not in ("constant", "one element"):
        np.testing.assert_array_equal(sent[largest], x[largest])
    rest = np.delete(np.arange(300), largest)
    step = np.abs(x[rest]).max() / 3
    assert (np.abs(sent[rest] - x[rest]) <= step * (1 + 1e-5)).all() or kind == "constant"
    np.testing.assert_allclose(sent + left, x, rtol=1e-5, atol=1e-6 * np.abs(x).max())
    assert len(payload) == 4


def test_variance_is_that_of_the_error_alone() -> None:
    """Where a few elements are large it is far below the quantiser's of the tensor itself."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    x[::10] *= 100

    def squared(codec: Any) -> float:
        return float(np.mean([(apply(codec, x, step=s)[1] ** 2).sum() for s in range(200)]))

    assert squared(CODEC) < 0.01 * squared(QSGD(3, 64))
    assert squared(CODEC) <= CODEC.bound(300).allowed(float(x.square().sum()))


def test_bound_is_the_product() -> None:
    bound = Induced(TopK(0.25), RandomK(0.5, unbiased=True)).bound(1000)
    assert bound == Variance(0.75 * 1.0)
    absolute = Induced(HardThreshold(0.5), RandomK(0.2, unbiased=True)).bound(1000)
    assert absolute == AbsoluteError(2.0 * HardThreshold(0.5).bound(1000).v)


def test_no_memory_by_default_and_levels_are_the_biased_one_s() -> None:
    lockstep = Lockstep(2, CODEC)
    assert not lockstep.engines[0].memory.buffers
    assert CODEC.at(0.5) == Induced(TopK(0.5), QSGD(3, 64))
    assert CODEC.level == 0.1


@pytest.mark.parametrize(
    ("biased", "unbiased", "word"),
    [
        (TopK(0.1), TopK(0.1), "unbiased"),
        (TopK(0.1), SignSGD(), "unbiased"),
        (Identity(), QSGD(), "biased"),
        (PowerSGD(), QSGD(), "biased"),
        (PerParameter(TopK()), QSGD(), "Wrappers go around"),
        (VarianceCriterion(), QSGD(), "sums of errors over steps"),
    ],
)
def test_refusals(biased: Any, unbiased: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Induced(biased, unbiased)
