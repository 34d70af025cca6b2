"""AtomoSVD samples singular triplets with the paper's probabilities."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import AtomoSVD, NoMemory, TwoShot
from lightning_gc.compressors.low_rank.atomo_svd import probabilities
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, each_kind

ROWS, COLUMNS = 15, 20
SIGMA = 4


def bucket_of(x: Tensor, shape: tuple[int, ...], step: int = 0) -> Bucket:
    return Bucket(x, {"w": shape}, step=step, seed=1)


def apply(
    x: Tensor, rank: int, step: int = 0, shape: tuple[int, ...] = (ROWS, COLUMNS)
) -> tuple[np.ndarray, np.ndarray, Payload]:
    """Return what was sent, what is left, and the payload."""
    buffer, out = x.clone(), torch.zeros_like(x)
    payload = AtomoSVD(rank).encode(buffer, bucket_of(x, shape, step))
    AtomoSVD(rank).decode(payload, out, 1.0, bucket_of(x, shape, step))
    return out.double().numpy(), buffer.double().numpy(), payload


def by_the_paper(values: np.ndarray, budget: float) -> np.ndarray:
    """Return the probabilities, one value after the other, the greatest first."""
    p = np.zeros(len(values))
    for i, value in enumerate(values):
        rest = values[i:].sum()
        if rest == 0:
            break
        if budget * value > rest:
            p[i] = 1
            budget -= 1
        else:
            p[i:] = budget * values[i:] / rest
            break
    return p


@each_kind
@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("flip", [False, True])
def test_each_triplet_is_one_of_the_svd_over_its_probability(
    kind: str, rank: int, flip: bool
) -> None:
    x = KINDS[kind]
    n, m = (COLUMNS, ROWS) if flip else (ROWS, COLUMNS)
    u, values, vt = np.linalg.svd(x.double().numpy().reshape(n, m), full_matrices=False)
    # Of a matrix of rank 1, NumPy's other values are its rounding.
    real = values > 1e-6 * values[0]
    p = by_the_paper(values * real, rank)
    for step in range(5):
        sent, left, (sent_u, sent_v) = apply(x, rank, step, (n, m))
        pairs = zip(
            sent_u.double().numpy().reshape(-1, n),
            sent_v.double().numpy().reshape(-1, m),
            strict=True,
        )
        seen = []
        for one_u, one_v in pairs:
            i = int(np.argmax(np.abs(u.T @ one_u)))
            wanted = np.outer(u[:, i], vt[i]) * values[i] / p[i]
            np.testing.assert_allclose(
                np.outer(one_u, one_v), wanted, rtol=0, atol=1e-4 * values[i] / p[i]
            )
            seen.append(i)
        assert len(set(seen)) == len(seen)
        assert set(np.flatnonzero(p == 1)) <= set(seen)
        whole = x.double().numpy()
        np.testing.assert_allclose(left, whole - sent, rtol=1e-5, atol=1e-6 * abs(sent).max())


@pytest.mark.parametrize("budget", [1, 2, 3.5, 12, 40])
@pytest.mark.parametrize("exponent", [0, 0.5, 1, 2, 8])
def test_probabilities(budget: float, exponent: float) -> None:
    """As the paper's loop has them; their sum; and the conditions for the least variance.

    Among those below 1, σ_i/p_i must be equal; it may not be less for those at 1.
    """
    values = np.arange(1.0, 21.0) ** -exponent
    p = probabilities(torch.tensor(values), budget).numpy()
    np.testing.assert_allclose(p, by_the_paper(values, budget), rtol=1e-9)
    assert math.isclose(p.sum(), min(budget, 20), rel_tol=1e-9)
    assert (p <= 1).all()
    inside = p < 1
    if inside.any():
        level = (values / p)[inside]
        np.testing.assert_allclose(level, level[0], rtol=1e-9)
        assert (values[~inside] >= level[0] * (1 - 1e-9)).all()


def test_probabilities_of_zeros_are_zero() -> None:
    assert not probabilities(torch.zeros(5), 2).any()
    assert probabilities(torch.tensor([2.0, 1.0, 0.0, 0.0]), 3).tolist() == [1, 1, 0, 0]


@pytest.mark.slow
def test_triplets_come_as_often_as_they_should() -> None:
    """Chi-square of their frequencies, and the variance that follows from the probabilities."""
    spectrum = 0.8 ** np.arange(ROWS)
    u = np.linalg.qr(np.random.default_rng(0).normal(size=(ROWS, ROWS)))[0]
    v = np.linalg.qr(np.random.default_rng(1).normal(size=(COLUMNS, COLUMNS)))[0][:, :ROWS]
    x = torch.tensor(u * spectrum @ v.T, dtype=torch.float32).reshape(-1)
    p, trials = by_the_paper(spectrum, 3), 1500
    counts, errors = np.zeros(ROWS), []
    for step in range(trials):
        _, left, (sent_u, _) = apply(x, 3, step)
        counts[np.abs(u.T @ sent_u.double().numpy().reshape(-1, ROWS).T).argmax(axis=0)] += 1
        errors.append((left**2).sum())
    chi = ((counts - trials * p) ** 2 / (trials * p * (1 - p))).sum()
    assert abs(chi - ROWS) < SIGMA * math.sqrt(2 * ROWS)
    variance = (spectrum**2 * (1 / p - 1)).sum()
    assert abs(np.mean(errors) - variance) < SIGMA * np.std(errors) / math.sqrt(trials)
    assert variance <= AtomoSVD(3).bound(300).allowed((spectrum**2).sum())


def test_equal_singular_values_reach_the_bound() -> None:
    """An orthogonal 16 x 16 matrix: 256 elements, ω = 16/2 − 1."""
    x = torch.linalg.qr(torch.randn(16, 16, generator=cases.generator(0))).Q.reshape(-1)
    errors = [(apply(x, 2, step, (16, 16))[1] ** 2).sum() for step in range(1000)]
    allowed = AtomoSVD(2).bound(256).allowed(16.0)
    assert allowed == 7 * 16
    assert abs(np.mean(errors) - allowed) < SIGMA * np.std(errors) / math.sqrt(1000)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_that_rank_is_sent_exactly(rank: int) -> None:
    draw = cases.generator(rank)
    x = torch.randn(40, rank, generator=draw) @ torch.randn(rank, 30, generator=draw)
    sent, _, (u, v) = apply(x.view(-1), rank, 0, (40, 30))
    assert (u.numel(), v.numel()) == (40 * rank, 30 * rank)
    np.testing.assert_allclose(sent, x.view(-1).numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_one_dimension_is_folded_and_shards_too() -> None:
    """101 elements in 10 rows of 11; unbiased also where two encodings follow each other."""
    x = cases.tensors(101)["normal"]
    _, _, (u, v) = apply(x, 2, 0, (101,))
    assert u.numel() * 11 == v.numel() * 10
    results = []
    for seed in range(300):
        lockstep = Lockstep(2, AtomoSVD(2), NoMemory(), TwoShot(), seed=seed)
        results.append(lockstep.step([{"w": x}, {"w": -0.5 * x}]).mean["w"].double())
    drawn = torch.stack(results)
    gap = (drawn.mean(0) - 0.25 * x).abs()
    assert (gap <= 5 * drawn.std(0) / 300**0.5).all()


def test_tensors_that_would_not_shrink_are_sent_as_they_are() -> None:
    x = cases.tensors(60)["heavy tails"]
    sent, left, (u, v) = apply(x, 2, 0, (2, 30))
    assert not AtomoSVD(2).compresses((2, 30))
    assert (u.numel(), v.numel()) == (0, 60)
    assert np.array_equal(sent, x.double().numpy())
    assert not left.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    for x in (KINDS["normal"].clone(), torch.zeros(300)):
        x[7] = bad
        assert not np.isfinite(apply(x, 2)[0]).all()


def test_more_triplets_than_a_matrix_has() -> None:
    u, v = torch.zeros(16 * ROWS), torch.zeros(16 * COLUMNS)
    out = torch.zeros(300)
    with pytest.raises(ValueError, match="16 singular triplets of a 15 x 20 matrix"):
        AtomoSVD(2).decode((u, v), out, 1.0, bucket_of(out, (ROWS, COLUMNS)))


@pytest.mark.parametrize("rank", [0, -1, 1.5, math.nan, math.inf])
def test_refusals(rank: float) -> None:
    with pytest.raises(ValueError, match=f"rank={rank}.*use 2"):
        AtomoSVD(rank)  # type: ignore[arg-type]
