"""ChunkedTopK sends the largest of each chunk; STC and SparseLoCo's values are made of it."""

import numpy as np
import pytest
import torch

from lightning_gc import STC, BinMeans, ChunkedTopK, Quantised, TopK
from tests.support.codecs import KINDS, apply, each_kind


@each_kind
@pytest.mark.parametrize(("density", "chunk"), [(0.1, 64), (0.3, 7), (0.01, 100), (0.1, 4096)])
def test_the_largest_of_each_chunk(kind: str, density: float, chunk: int) -> None:
    x = KINDS[kind].numpy()
    sent, left, (values, _) = apply(ChunkedTopK(density, chunk), KINDS[kind])
    total = 0
    for start in range(0, 300, chunk):
        part, got = x[start : start + chunk], sent[start : start + chunk]
        k = max(1, round(density * len(part)))
        total += k
        np.testing.assert_array_equal(got[got != 0], part[got != 0])
        # Of equal magnitudes any may be taken.
        wanted = np.sort(np.abs(part))[-k:]
        np.testing.assert_array_equal(np.sort(np.abs(got))[-k:], wanted)
        assert np.count_nonzero(got) <= k
    assert values.numel() == total
    np.testing.assert_array_equal(left + sent, x)


def test_a_chunk_as_large_as_the_tensor_is_topk() -> None:
    x = KINDS["normal"]
    ours, _, _ = apply(ChunkedTopK(0.1, 300), x)
    theirs, _, _ = apply(TopK(0.1), x)
    np.testing.assert_array_equal(ours, theirs)


def test_positions_take_fewer_bits_than_offsets() -> None:
    """The paper's 64 of 4,096: 8 bits by Elias-Fano, where an offset has 12."""
    values, positions = ChunkedTopK().wire(1 << 20)
    assert values.length == (1 << 20) // 64
    assert 8 * positions.nbytes / values.length < 8.01


def test_with_the_means_of_four_bins() -> None:
    """SparseLoCo's: at 1.56 % a 2-bit value and a position, far below a float's bits."""
    codec = Quantised(ChunkedTopK(0.1, 64), BinMeans(2))
    sent, left, _ = apply(codec, KINDS["normal"])
    chosen = np.flatnonzero(apply(ChunkedTopK(0.1, 64), KINDS["normal"])[0])
    x = KINDS["normal"].numpy()
    assert set(np.flatnonzero(sent)) == set(chosen)
    assert len(np.unique(sent[chosen])) <= 4
    assert (np.sign(sent[chosen]) == np.sign(x[chosen])).all()
    np.testing.assert_allclose(sent + left, x, rtol=1e-5, atol=1e-6)


@each_kind
def test_stc_sends_one_magnitude(kind: str) -> None:
    """Algorithm 1 of the paper: the mean magnitude of the k largest, with their signs."""
    x = KINDS[kind].double().numpy()
    sent, _, _ = apply(STC(0.1).inner, KINDS[kind])
    k = 30
    mu = np.sort(np.abs(x))[-k:].mean()
    assert np.count_nonzero(sent) in (k, 0)
    np.testing.assert_allclose(np.abs(sent[sent != 0]), mu, rtol=1e-5)
    smallest_sent = np.abs(x[sent != 0]).min(initial=np.inf)
    assert smallest_sent >= np.sort(np.abs(x))[-k]
    signs = np.where(x[sent != 0] >= 0, 1, -1)
    assert (np.sign(sent[sent != 0]) == signs).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="chunk=0"):
        ChunkedTopK(chunk=0)
    with pytest.raises(ValueError, match="density"):
        STC(1.5)


def test_nan_is_sent() -> None:
    """It must not stay in the error unseen."""
    x = torch.zeros(100)
    x[70] = torch.nan
    sent, _, _ = apply(ChunkedTopK(0.1, 20), x)
    assert np.isnan(sent[70])
