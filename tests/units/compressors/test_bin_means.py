"""BinMeans sends the mean of each bin, as NumPy finds bins and means."""

import numpy as np
import pytest
import torch

from lightning_gc import BinMeans, OneBitSGD
from tests.support.codecs import KINDS, apply, each_kind


@each_kind
@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 64, 512])
def test_bins_and_their_means(kind: str, bits: int, size: int) -> None:
    x = KINDS[kind].double().numpy()
    sent, left, (codes, *means) = apply(BinMeans(bits, size), KINDS[kind])
    assert codes.numel() == -(-300 * bits // 8)
    assert len(means) == 2**bits
    for start in range(0, 300, size):
        block, got = x[start : start + size], sent[start : start + size]
        sigma = np.sqrt((block**2).mean())
        edges = sigma * (np.arange(1, 2**bits) * 6 / 2**bits - 3)
        # On an edge, up to rounding, either bin is right.
        at = np.abs(block[:, None] - edges).min(1, initial=np.inf) <= 1e-5 * sigma
        if at[block != 0].any():
            continue
        bins = np.digitize(block, edges) if sigma > 0 else np.full(len(block), 2 ** (bits - 1))
        wanted = np.zeros(len(block))
        for i in range(2**bits):
            wanted[bins == i] = block[bins == i].mean() if (bins == i).any() else 0
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * sigma)
    np.testing.assert_allclose(left, x - sent, rtol=1e-4, atol=1e-6 * np.abs(x).max())


@each_kind
def test_one_bit_is_one_bit_sgd(kind: str) -> None:
    ours, _, _ = apply(BinMeans(1, 512), KINDS[kind])
    theirs, _, _ = apply(OneBitSGD(), KINDS[kind])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7 * np.abs(theirs).max())


def test_a_short_block_has_means_of_its_own_elements() -> None:
    """What it is filled up with is in no bin."""
    x = torch.tensor([1.0] * 64 + [1.0, 2.0, 4.0])
    sent, _, _ = apply(BinMeans(1, 64), x)
    np.testing.assert_allclose(sent[64:], 7 / 3, rtol=1e-6)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"bits=5.*1\.\.4"):
        BinMeans(5)
