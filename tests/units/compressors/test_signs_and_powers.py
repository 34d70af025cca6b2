"""EFSignSGD, OneBitSGD, NaturalCompression and unbiased RandomK match their formulas."""

import math

import numpy as np
import pytest
import torch

from lightning_gc import EFSignSGD, NaturalCompression, OneBitSGD, RandomK
from tests.support.codecs import KINDS, apply, each_kind


@each_kind
def test_ef_sign_sgd(kind: str) -> None:
    x = KINDS[kind].double().numpy()
    sent, _, (signs, scale) = apply(EFSignSGD(), KINDS[kind])
    wanted = np.where(x >= 0, 1.0, -1.0) * np.abs(x).mean()
    np.testing.assert_allclose(sent, wanted, rtol=1e-5)
    assert (signs.numel(), scale.numel()) == (math.ceil(300 / 8), 1)


@each_kind
def test_one_bit_sgd(kind: str) -> None:
    x = KINDS[kind].double().numpy()
    sent, _, (signs, means) = apply(OneBitSGD(), KINDS[kind])
    above = x[x >= 0].mean() if (x >= 0).any() else 0.0
    below = x[x < 0].mean() if (x < 0).any() else 0.0
    np.testing.assert_allclose(sent, np.where(x >= 0, above, below), rtol=1e-5)
    assert (signs.numel(), means.numel()) == (math.ceil(300 / 8), 2)


@each_kind
@pytest.mark.parametrize("step", range(5))
def test_natural_compression_sends_a_power_next_to_it(kind: str, step: int) -> None:
    x = KINDS[kind].double().numpy()
    sent, _, (exponents, signs) = apply(NaturalCompression(), KINDS[kind], step)
    for value, got in zip(x, sent.astype(np.float64), strict=True):
        if value == 0:
            assert got == 0
            continue
        fraction, exponent = math.frexp(abs(value))  # 0.5 <= fraction < 1
        around = {2.0 ** (exponent - 1)} | ({2.0**exponent} if fraction > 0.5 else set())
        assert abs(got) in around
        assert math.copysign(1, got) == math.copysign(1, value)
    assert (exponents.numel(), signs.numel()) == (300, math.ceil(300 / 8))


def test_natural_compression_rounds_up_as_often_as_it_should() -> None:
    """Chi-square of the frequency of the greater power, against its distance to the smaller."""
    x = torch.linspace(1.02, 1.98, 97)
    ups, trials = np.zeros(97), 2000
    for step in range(trials):
        ups += apply(NaturalCompression(), x, step)[0] == 2
    p = x.double().numpy() - 1
    chi = ((ups - trials * p) ** 2 / (trials * p * (1 - p))).sum()
    assert abs(chi - 97) < 4 * math.sqrt(2 * 97)


def test_natural_compression_at_the_ends_of_the_range() -> None:
    """The largest stay finite, the smallest keep their mean, what is not finite shows."""
    largest = torch.finfo(torch.float32).max
    sent, left, _ = apply(NaturalCompression(), torch.tensor([largest, -largest]))
    assert sent.tolist() == [2.0**127, -(2.0**127)]
    assert np.isfinite(left).all()
    subnormal = torch.full((1000,), 2.0**-128)
    sent = np.concatenate([apply(NaturalCompression(), subnormal, step)[0] for step in range(9)])
    assert set(sent.tolist()) == {0.0, 2.0**-126}
    share = float((sent > 0).mean())
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 9000)
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not np.isfinite(apply(NaturalCompression(), torch.tensor([bad]))[0]).any()


@each_kind
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_unbiased_randomk(kind: str, density: float) -> None:
    x = KINDS[kind].numpy()
    sent, left, (values,) = apply(RandomK(density, unbiased=True), KINDS[kind])
    k = max(1, round(density * 300))
    assert values.numel() == k
    assert np.count_nonzero(sent) <= k
    chosen = sent != 0
    np.testing.assert_allclose(sent[chosen], x[chosen] * 300 / k, rtol=1e-5)
    np.testing.assert_allclose(left, x - sent, rtol=1e-5)
