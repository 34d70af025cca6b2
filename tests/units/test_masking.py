"""Momentum that is masked by another rule than the paper's, and where shards have owners."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import AllGather, MomentumCorrection, TopK, TwoShot
from lightning_gc.testing import Lockstep

STEPS = 12


@pytest.mark.parametrize("masking", ["sampled", "none"])
def test_momentum_that_is_masked_otherwise(masking: Any) -> None:
    """Where v exceeds the least of a hundredth of it, or nowhere; 300 elements, 5 sent."""
    lockstep = Lockstep(1, TopK(5 / 300), MomentumCorrection(0.9, masking=masking))
    u, v = np.zeros(300), np.zeros(300)
    for step in range(STEPS):
        grad = np.random.default_rng(step).standard_normal(300)
        u = 0.9 * u + grad
        v = v + u
        sent = np.argsort(-np.abs(v))[:5]
        least = min(abs(v[0]), abs(v[100]), abs(v[200]))
        u = np.where(np.abs(v) > least, 0, u) if masking == "sampled" else u
        expected = np.zeros(300)
        expected[sent] = v[sent]
        v[sent] = 0
        mean = lockstep.step([{"w": torch.tensor(grad).float()}]).mean["w"]
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-4, atol=1e-5)
    kept = lockstep.engines[0].state_dict()["memory"]["w"]["momentum"]
    np.testing.assert_allclose(kept.numpy(), u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masking", ["sent", "sampled", "none"])
@pytest.mark.parametrize("shape", [(0,), (4,)])
def test_what_is_sent_whole_is_masked_by_no_rule(masking: Any, shape: tuple[int, ...]) -> None:
    lockstep = Lockstep(1, TopK(1.0), MomentumCorrection(0.5, masking=masking))
    means = [lockstep.step([{"w": torch.ones(shape)}]).mean["w"] for _ in range(2)]
    assert means[1].tolist() == [1.5] * shape[0]


def test_a_shards_owner_masks_what_comes_back_too() -> None:
    """One element is sent: worker 1's is left out of what worker 0 encodes for all."""
    first, other = torch.full((8,), 0.1), torch.full((8,), 0.1)
    first[0], first[1], other[1] = 5.0, 1.0, 4.0
    for scheme, error, momentum in ((TwoShot(), 5.0, 0.0), (AllGather(), 1.0, 1.0)):
        lockstep = Lockstep(2, TopK(0.125), MomentumCorrection(0.9), scheme)
        lockstep.step([{"w": first}, {"w": other}])
        kept = lockstep.engines[0].state_dict()["memory"]["w"]
        assert (kept["error"][1], kept["momentum"][1]) == (error, momentum)
