"""TopK, HardThreshold, RandomK, QSGD and Cast match independent NumPy references."""

import math

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, Cast, HardThreshold, RandomK, TopK
from lightning_gc.testing.contracts import cases
from tests.support.codecs import apply

KINDS = ["normal", "heavy tails", "all negative", "one element", "zeros", "tiny", "huge"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_topk(kind: str, density: float) -> None:
    x = cases.tensors(1000)[kind]
    sent, left, payload = apply(TopK(density), x)
    k = max(1, round(density * 1000))
    smallest_sent = np.sort(np.abs(x.numpy()))[-k]
    assert (np.abs(left) <= smallest_sent).all()
    assert np.count_nonzero(sent) <= k
    assert ((sent == x.numpy()) | (sent == 0)).all()
    assert ((sent == 0) | (left == 0)).all()
    values, indices = payload
    assert values.numel() == k
    low = int(math.log2(1000 / k))  # bits stored as they are; the others in a bitmap
    assert indices.numel() == math.ceil(k * low / 8) + math.ceil((k + 999 // 2**low + 1) / 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 2.0, 1e9])
def test_hard_threshold(kind: str, threshold: float) -> None:
    x = cases.tensors(1000)[kind]
    sent, left, payload = apply(HardThreshold(threshold), x)
    expected = np.where(np.abs(x.numpy()) >= threshold, x.numpy(), 0)
    np.testing.assert_array_equal(sent, expected)
    np.testing.assert_array_equal(left, x.numpy() - expected)
    assert payload[0].numel() == np.count_nonzero(np.abs(x.numpy()) >= threshold)


def test_randomk_draws_each_element_equally_often_and_alike_on_all_workers() -> None:
    x = torch.ones(50)
    counts = np.zeros(50)
    for step in range(2000):
        sent, _, payload = apply(RandomK(0.1), x, step)
        assert payload[0].numel() == 5
        assert sent.sum() == 5  # without replacement
        counts += sent
    sigma = math.sqrt(2000 * 0.1 * 0.9)
    assert np.abs(counts - 200).max() < 5 * sigma
    for worker in (0, 3):
        buffer = x.clone()
        RandomK(0.1).encode(buffer, cases.bucket_of(x, step=3, worker=worker, workers=4))
        assert torch.equal(buffer, torch.from_numpy(apply(RandomK(0.1), x, 3)[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_levels_are_neighbours_of_the_exact_ratio(kind: str, bits: int, norm: str) -> None:
    """Every block: sent = norm * level / s with the level next to s*|x|/norm, signs kept."""
    x = cases.tensors(300)[kind]
    sent, _, payload = apply(QSGD(bits, 128, norm), x)  # type: ignore[arg-type]
    s = 2 ** (bits - 1) - 1
    assert payload[0].numel() == math.ceil(300 * (bits // 8 * 8) / 8) + math.ceil(
        300 * (bits % 8) / 8
    )
    for block in range(3):
        piece = x.numpy()[block * 128 : (block + 1) * 128].astype(np.float64)
        length = np.abs(piece).max() if norm == "max" else np.sqrt((piece**2).sum())
        got = sent[block * 128 : (block + 1) * 128].astype(np.float64)
        if length == 0:
            assert not got.any()
            continue
        level = np.abs(got) / length * s
        np.testing.assert_allclose(level, np.round(level), atol=2e-2)
        exact = np.abs(piece) / length * s
        assert (np.abs(np.round(level) - exact) < 1 + 1e-2).all()
        assert (np.sign(got) * np.sign(piece) >= 0).all()


def test_qsgd_rounds_up_as_often_as_it_should() -> None:
    """Chi-square of the frequency of rounding up, against s*|x|/norm - floor."""
    x = torch.linspace(-1, 1, 201)
    ups, trials, s = np.zeros(201), 2000, 7
    exact = np.abs(x.numpy().astype(np.float64)) * s
    for step in range(trials):
        sent, _, _ = apply(QSGD(4), x, step)
        ups += np.round(np.abs(sent) * s) > np.floor(exact)
    p = exact - np.floor(exact)
    random = (p > 0.01) & (p < 0.99)
    p, ups = p[random], ups[random]
    chi2 = ((ups - trials * p) ** 2 / (trials * p * (1 - p))).sum()
    assert abs(chi2 - len(p)) < 5 * math.sqrt(2 * len(p))


@pytest.mark.parametrize("kind", KINDS)
def test_cast_float16_equals_numpy(kind: str) -> None:
    x = cases.tensors(300)[kind]
    sent, left, _ = apply(Cast("float16"), x)
    clipped = np.clip(x.numpy(), -65504, 65504)
    np.testing.assert_array_equal(sent, clipped.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(left, x.numpy() - sent)


def test_cast_bfloat16_is_nearest_even() -> None:
    x = cases.tensors(300)["normal"]
    sent, left, _ = apply(Cast("bfloat16"), x)
    whole = x.numpy().view(np.uint32).astype(np.uint64)
    rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) & 0xFFFF0000
    np.testing.assert_array_equal(sent.view(np.uint32), rounded.astype(np.uint32))
    np.testing.assert_array_equal(left, x.numpy() - sent)


def test_cast_accepts_a_torch_dtype() -> None:
    assert Cast(torch.bfloat16) == Cast("bfloat16")  # type: ignore[arg-type]
