"""AQSGD's levels make the variance least, as a search in NumPy finds them."""

import itertools

import numpy as np
import pytest
import torch

from lightning_gc import AQSGD, QSGD
from lightning_gc.compressors.quantisers import aqsgd
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, STUDENT, apply, each_kind


def variance(shares: np.ndarray, levels: np.ndarray) -> float:
    below = np.clip(np.searchsorted(levels, shares, side="right") - 1, 0, len(levels) - 2)
    return float(((levels[below + 1] - shares) * (shares - levels[below])).sum())


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "Student t, 2 degrees"])
def test_levels_are_near_the_best(kind: str) -> None:
    """Of three bits: of all pairs of the sample's own elements."""
    x = KINDS[kind].abs()[:60]
    shares = (x / x.max()).numpy()
    ours = variance(shares, aqsgd.fitted(torch.tensor(shares), 3).numpy())
    pairs = itertools.combinations(np.sort(shares), 2)
    best = min(variance(shares, np.array([0, *pair, 1])) for pair in pairs)
    assert best * (1 - 1e-6) <= ours <= 1.15 * best


@each_kind
@pytest.mark.parametrize(("bits", "size"), [(2, 7), (3, 64), (5, 512)])
def test_it_rounds_to_a_level_next_to_each_element(kind: str, bits: int, size: int) -> None:
    x = KINDS[kind].double().numpy()
    sent, left, (_, norms, inner) = apply(AQSGD(bits, size), KINDS[kind])
    levels = np.array([0, *inner.double().numpy(), 1])
    assert (np.diff(levels) >= 0).all()
    assert len(levels) == 2 ** (bits - 1)
    for number, start in enumerate(range(0, 300, size)):
        block, got = x[start : start + size], sent[start : start + size]
        norm = np.abs(block).max()
        np.testing.assert_allclose(norms[number], norm, rtol=1e-6)
        if norm == 0:
            assert not got.any()
            continue
        shares = np.abs(block) / norm
        below = np.clip(np.searchsorted(levels, shares * (1 + 1e-6), "right") - 1, 0, None)
        above = np.searchsorted(levels, shares * (1 - 1e-6), "left")
        found = np.abs(got) / norm
        fits = np.isclose(found, levels[below], rtol=1e-5) | np.isclose(found, levels[above])
        assert fits.all()
        assert (got * block >= 0).all()
    np.testing.assert_allclose(left, x - sent, rtol=1e-4, atol=1e-6 * np.abs(x).max())


def test_it_is_right_on_average() -> None:
    """Along random directions, up to 4 sigma."""

    def draw(step: int) -> torch.Tensor:
        return torch.from_numpy(apply(AQSGD(3, 64), STUDENT, step=step)[0])

    assert cases.unbiased(draw, STUDENT, 200)


def test_less_variance_than_equal_levels() -> None:
    ours, equal = (
        np.mean([np.square(apply(codec, STUDENT, step=s)[1]).sum() for s in range(40)])
        for codec in (AQSGD(3), QSGD(3))
    )
    assert ours < 0.6 * equal


def test_two_bits_have_no_level_to_move() -> None:
    _, _, (_, _, inner) = apply(AQSGD(2), KINDS["normal"])
    assert inner.numel() == 0
