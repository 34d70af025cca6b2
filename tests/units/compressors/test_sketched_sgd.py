"""SketchedSGD matches a count sketch in NumPy, element by element, and finds heavy elements."""

import numpy as np
import pytest
import torch

from lightning_gc import SketchedSGD
from lightning_gc.compressors.sparsifiers import sketched_sgd
from lightning_gc.core.bucket import Bucket
from lightning_gc.testing import Lockstep

SIZE, DENSITY, ROWS, COLUMNS, CANDIDATES = 1500, 0.01, 3, 6, 2
K = round(DENSITY * SIZE)
CODEC = SketchedSGD(DENSITY, ROWS, COLUMNS, CANDIDATES)
SEED = Bucket(torch.zeros(SIZE), {"w": (SIZE,)}).generator_seed(shared=True)


def mixed(z: int) -> int:
    """Return what splitmix64 makes of a counter, by its definition."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def hashed(row: int, i: int) -> tuple[int, int]:
    found = mixed((i * 0x9E3779B97F4A7C15 + SEED + (row << 60)) % 2**64)
    return (found >> 1) % 2**62 % (COLUMNS * K), 2 * (found & 1) - 1


def given(seed: int) -> np.ndarray:
    x: np.ndarray = np.random.default_rng(seed).standard_t(2, SIZE)
    return x.astype(np.float32)


def test_a_loop_in_numpy() -> None:
    """Sketches, medians, the second round, and errors of three workers."""
    xs = [given(worker) for worker in range(3)]
    mean = np.stack(xs).astype(np.float64).mean(0)
    hashes = [[hashed(row, i) for i in range(SIZE)] for row in range(ROWS)]
    sums = np.zeros((ROWS, COLUMNS * K))
    for row in range(ROWS):
        for i, (place, sign) in enumerate(hashes[row]):
            sums[row, place] += sign * mean[i]
    each = [[sign * sums[row][p] for p, sign in hashes[row]] for row in range(ROWS)]
    estimates: np.ndarray = np.median(each, 0)
    candidates = np.sort(np.argsort(-np.abs(estimates), kind="stable")[: CANDIDATES * K])
    kept = candidates[np.argsort(-np.abs(mean[candidates]), kind="stable")[:K]]
    wanted = np.zeros(SIZE)
    wanted[kept] = mean[kept]

    result = Lockstep(3, CODEC).step([{"w": torch.tensor(x)} for x in xs])
    np.testing.assert_allclose(result.mean["w"].numpy(), wanted, rtol=1e-5, atol=1e-6)
    for x, errors in zip(xs, result.errors, strict=True):
        left = x.copy()
        left[kept] = 0
        np.testing.assert_array_equal(errors["w"].numpy(), left)


def test_estimates_are_unbiased_over_seeds() -> None:
    """Of one row: of an element among many, over other hashes."""
    x = torch.tensor(given(0))
    found = []
    for seed in range(300):
        sums = sketched_sgd.sketch(x, seed, 1, 400)
        found.append(float(sketched_sgd.estimated(sums, seed, 1, SIZE)[5]))
    assert abs(np.mean(found) - float(x[5])) < 4 * np.std(found) / np.sqrt(300)


def test_it_finds_what_is_large_in_the_mean_and_not_on_any_worker() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [0.02 * torch.randn(SIZE, generator=draw) for _ in range(4)]
    common = torch.arange(0, SIZE, 150)
    for worker, x in enumerate(xs):
        x[common] += 1.0
        x[20 + 9 * worker : 28 + 9 * worker] += 1.2  # larger here, and 0.3 in the mean
    result = Lockstep(4, SketchedSGD(DENSITY)).step([{"w": x} for x in xs])
    assert set(common.tolist()) <= set(result.mean["w"].nonzero().view(-1).tolist())


def test_bytes_do_not_grow_with_workers() -> None:
    x = {"w": torch.tensor(given(0))}
    sizes = [Lockstep(workers, CODEC).step([x] * workers).wire_bytes[0] for workers in (2, 8)]
    numbers = ROWS * COLUMNS * K + CANDIDATES * K
    assert [round(size / numbers) for size in sizes] == [4, 7]  # 4·2·(W − 1)/W bytes


def test_refusals() -> None:
    for rows in (4, 17):  # the 17th row would have the places of the first
        with pytest.raises(ValueError, match=f"rows={rows}"):
            SketchedSGD(rows=rows)
    with pytest.raises(ValueError, match="candidates=0"):
        SketchedSGD(candidates=0)
