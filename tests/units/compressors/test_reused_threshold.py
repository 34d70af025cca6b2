"""ReusedThreshold matches a loop in NumPy, with error feedback, over several steps."""

from typing import Any

import numpy as np
import torch

from lightning_gc import ReusedThreshold
from lightning_gc.bucket import Bucket
from lightning_gc.testing import Lockstep
from tests.support.codecs import apply

STEPS, EVERY, DENSITY = 11, 4, 0.1


def gradient(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((8, 5)).astype(np.float32)


def test_feedback_and_thresholds() -> None:
    lockstep = Lockstep(1, ReusedThreshold(DENSITY, EVERY))
    error, threshold = np.zeros((8, 5), np.float32), 0.0
    counts = []
    for step in range(STEPS):
        x = error + gradient(step)
        if step % EVERY == 0:
            threshold = np.sort(np.abs(x).reshape(-1))[-4]
        sent = np.where(np.abs(x) >= threshold, x, 0)
        error = x - sent
        result = lockstep.step([{"w": torch.tensor(gradient(step))}])
        np.testing.assert_allclose(result.mean["w"].numpy(), sent, rtol=1e-6)
        counts.append(np.count_nonzero(sent))
    assert counts[0] == counts[4] == counts[8] == 4
    assert len(set(counts)) > 1


def test_another_density_finds_another_threshold() -> None:
    lockstep = Lockstep(1, ReusedThreshold(DENSITY, 1000))
    lockstep.step([{"w": torch.tensor(gradient(0))}])
    lockstep.engines[0].set_levels(0.5)
    result = lockstep.step([{"w": torch.tensor(gradient(1))}])
    assert result.mean["w"].count_nonzero() == 20


def test_a_resumed_run_keeps_its_threshold() -> None:
    straight, resumed = (Lockstep(1, ReusedThreshold(DENSITY, 1000)) for _ in range(2))
    straight.step([{"w": torch.tensor(gradient(0))}])
    resumed.engines[0].load_state_dict(straight.engines[0].state_dict())
    made = [{"w": torch.tensor(gradient(1))}]
    assert torch.equal(straight.step(made).mean["w"], resumed.step(made).mean["w"])


def test_zeros_and_what_is_not_finite_set_no_threshold() -> None:
    """Or everything, or nothing, would be sent until the next one."""
    codec, state = ReusedThreshold(DENSITY, 1000), dict[str, Any]()
    for step, bad in enumerate((0.0, float("inf"), float("nan"))):
        x = torch.full((40,), bad)
        apply(codec, x, bucket=Bucket(x, {"w": (40,)}, step=step, state={"w": state}))
        assert not state
    x = torch.tensor(gradient(0)).view(-1)
    sent, _, _ = apply(codec, x, bucket=Bucket(x, {"w": (40,)}, step=3, state={"w": state}))
    assert np.count_nonzero(sent) == 4
