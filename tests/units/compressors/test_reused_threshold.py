"""ReusedThreshold matches a loop in NumPy, with error feedback, over several steps."""

from typing import Any

import numpy as np
import torch

from lightning_gc import ReusedThreshold
from lightning_gc.core.bucket import Bucket
from lightning_gc.testing import Lockstep
from tests.support.codecs import apply

STEPS, EVERY, DENSITY = 16, 4, 0.1
FOUND = {0, 1, 3, 6, 10, 14}  # thresholds are used for 1, 2, 3, 4, 4, ... steps


def gradient(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((8, 5)).astype(np.float32)


def test_feedback_and_thresholds() -> None:
    lockstep = Lockstep(1, ReusedThreshold(DENSITY, EVERY))
    error, threshold = np.zeros((8, 5), np.float32), 0.0
    counts = []
    for step in range(STEPS):
        x = error + gradient(step)
        if step in FOUND:
            threshold = np.sort(np.abs(x).reshape(-1))[-4]
        sent = np.where(np.abs(x) >= threshold, x, 0)
        error = x - sent
        result = lockstep.step([{"w": torch.tensor(gradient(step))}])
        np.testing.assert_allclose(result.mean["w"].numpy(), sent, rtol=1e-6)
        counts.append(np.count_nonzero(sent))
    assert {counts[step] for step in FOUND} == {4}
    assert len(set(counts)) > 1


def test_what_is_sent_is_about_the_density() -> None:
    """Errors grow at first; a threshold of the first step would let six times as much pass."""
    lockstep, draw = Lockstep(1, ReusedThreshold(0.02)), np.random.default_rng(0)
    sent = []
    for _ in range(200):
        made = torch.tensor(draw.standard_normal(2000).astype(np.float32))
        sent.append(int(lockstep.step([{"w": made}]).mean["w"].count_nonzero()))
    assert 0.9 * 40 < np.mean(sent[10:]) < 1.5 * 40


def test_another_density_finds_another_threshold() -> None:
    lockstep = Lockstep(1, ReusedThreshold(DENSITY, 1000))
    for step in range(4):  # the threshold of step 3 is for three steps
        lockstep.step([{"w": torch.tensor(gradient(step))}])
    lockstep.engines[0].levels.set(0.5)
    result = lockstep.step([{"w": torch.tensor(gradient(4))}])
    assert result.mean["w"].count_nonzero() == 20


def test_a_resumed_run_keeps_its_threshold() -> None:
    straight, resumed = (Lockstep(1, ReusedThreshold(DENSITY, 1000)) for _ in range(2))
    for step in range(4):
        straight.step([{"w": torch.tensor(gradient(step))}])
    resumed.engines[0].load_state_dict(straight.engines[0].state_dict())
    for step in range(4, 8):
        made = [{"w": torch.tensor(gradient(step))}]
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
