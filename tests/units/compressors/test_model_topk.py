"""ModelTopK: one threshold for all tensors, as a fine grid in NumPy finds it."""

import numpy as np
import pytest
import torch

from lightning_gc import ModelTopK
from lightning_gc.testing import Lockstep

SCALES = {"large": 1.0, "middle": 0.3, "small": 0.01}
DENSITY, SIZE = 0.02, 2000
K = round(DENSITY * SIZE)


def gradient(step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(step)
    return {
        name: torch.tensor(scale * each * draw.standard_normal((40, 50)), dtype=torch.float32)
        for name, each in SCALES.items()
    }


def threshold_of(tails: list[tuple[float, np.ndarray]]) -> float:
    """Return what K elements of each tensor reach in sum, by trying a fine grid."""
    logs = [np.log(each) for each, _ in tails]
    grid = np.linspace(min(logs) - np.log(4), max(logs) + np.log(4), 200_001)
    expected = np.zeros_like(grid)
    for known, sent in tails:
        if len(sent):
            hill = np.clip(np.log(sent / known).mean(), 0.02, 2.0)
            expected += len(sent) * np.exp((np.log(known) - grid) / hill)
    return float(np.exp(grid[np.argmin(np.abs(np.log(np.maximum(expected, 1e-300) / (3 * K))))]))


def test_a_loop_in_numpy() -> None:
    lockstep = Lockstep(1, ModelTopK(DENSITY))
    errors = {name: np.zeros(SIZE, np.float32) for name in SCALES}
    tails: list[tuple[float, np.ndarray]] = []
    for step in range(8):
        given = gradient(step, 1.0 if step < 5 else 0.2)
        result = lockstep.step([given])
        common = threshold_of(tails) if tails else None
        tails = []
        for name in SCALES:
            x = errors[name] + given[name].numpy().reshape(-1)
            threshold = np.sort(np.abs(x))[-K] if common is None else common
            unsure = np.abs(np.abs(x) / threshold - 1) < 1e-4  # between points of the grid
            sent = np.where(np.abs(x) >= threshold, x, 0)
            got = result.mean[name].numpy().reshape(-1)
            np.testing.assert_allclose(got[~unsure], sent[~unsure], rtol=1e-6)
            errors[name] = x - got
            reached, most = np.abs(got[got != 0]), np.abs(x).max(keepdims=True)
            tails.append((threshold, reached) if len(reached) else (most[0], most))


def test_it_sends_about_k_of_the_model_and_most_of_the_largest() -> None:
    lockstep = Lockstep(1, ModelTopK(DENSITY))
    sent = dict.fromkeys(SCALES, 0)
    for step in range(60):
        result = lockstep.step([gradient(step)])
        for name in SCALES if step >= 20 else ():
            sent[name] += int(result.mean[name].count_nonzero())
    assert 0.8 < sum(sent.values()) / (40 * 3 * K) < 1.25
    assert sent["large"] > 2 * sent["middle"] > 20 * sent["small"]


def test_a_tensor_that_is_sent_whole_counts_no_more() -> None:
    lockstep, counts = Lockstep(1, ModelTopK(DENSITY)), []
    for step in range(30):
        if step == 10:
            lockstep.engines[0].levels.set(DENSITY, {"large": None, "middle": None})
        counts.append(int(lockstep.step([gradient(step)]).mean["small"].count_nonzero()))
    assert 0.8 < np.mean(counts[15:]) / K < 1.25


@pytest.mark.parametrize(("scale", "least"), [(1e-3, 0.15), (0.1, 0.25), (1e3, 0.7)])
def test_it_follows_a_sudden_change_of_scale(scale: float, least: float) -> None:
    lockstep = Lockstep(1, ModelTopK(DENSITY))
    counts = []
    for step in range(40):
        result = lockstep.step([gradient(step, 1.0 if step < 10 else scale)])
        counts.append(sum(int(mean.count_nonzero()) for mean in result.mean.values()))
    assert least < np.mean(counts[30:]) / (3 * K) < 1.5


def test_buckets_of_a_round_have_the_threshold_of_the_round_before() -> None:
    """One after the other or all in one: what the first has found is not used by the second."""
    joint, apart = (Lockstep(1, ModelTopK(DENSITY)) for _ in range(2))
    for step in range(4):
        given = gradient(step)
        wanted = joint.step([given]).mean
        (engine,) = apart.engines
        flats = {name: grad.reshape(-1).clone() for name, grad in given.items()}
        for name, flat in flats.items():
            apart.transport.run([engine.flow(flat, {name: (40, 50)})])
        engine.advance()
        for name, flat in flats.items():
            assert torch.equal(flat, wanted[name].reshape(-1)), (step, name)


def test_a_resumed_run_keeps_its_threshold() -> None:
    straight, resumed = (Lockstep(1, ModelTopK(DENSITY)) for _ in range(2))
    for step in range(3):
        straight.step([gradient(step)])
    resumed.engines[0].load_state_dict(straight.engines[0].state_dict())
    one, other = (run.step([gradient(3)]).mean for run in (straight, resumed))
    assert all(torch.equal(one[name], other[name]) for name in SCALES)


def test_a_tensor_that_is_sent_whole_does_not_count() -> None:
    """Or others would have to make up for what it may send."""
    lockstep = Lockstep(1, ModelTopK(DENSITY))
    lockstep.engines[0].levels.set(DENSITY, {"small": 1.0})
    counts = []
    for step in range(30):
        mean = lockstep.step([gradient(step)]).mean
        assert mean["small"].count_nonzero() == SIZE
        counts.append(int(mean["large"].count_nonzero() + mean["middle"].count_nonzero()))
    assert 0.7 < np.mean(counts[10:]) / (2 * K) < 1.4


def test_zeros_and_what_is_not_finite_set_no_threshold() -> None:
    lockstep = Lockstep(1, ModelTopK(DENSITY))
    zeros = {name: torch.zeros(40, 50) for name in SCALES}
    spoiled = {name: torch.full((40, 50), torch.nan) for name in SCALES}
    for given in (zeros, spoiled, zeros):
        lockstep.step([given])
    for step in range(6):
        result = lockstep.step([gradient(step)])
    assert 0.3 < sum(int(mean.count_nonzero()) for mean in result.mean.values()) / (3 * K) < 3
