"""Positions drawn without replacement are distinct, complete and uniform."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc import (
    AllGather,
    AllReduce,
    RandomK,
    RandomMask,
    TwoShot,
    UnbiasedRandomK,
)
from lightning_gc.bucket import Bucket
from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier, positions
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep


def draw(numel: int, k: int, seed: int) -> list[int]:
    return positions(numel, k, torch.Generator().manual_seed(seed)).tolist()


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 2**62))
def test_k_different_ones(numel: int, share: float, seed: int) -> None:
    k = min(numel, max(1, round(share * numel)))
    found = draw(numel, k, seed)
    assert len(set(found)) == len(found) == k
    assert min(found) >= 0
    assert max(found) < numel
    assert draw(numel, k, seed) == found


@pytest.mark.parametrize(("numel", "k"), [(10, 2), (11, 1), (6, 3)])
def test_all_sets_are_equally_likely(numel: int, k: int) -> None:
    """Chi-square over all sets, 4 standard deviations; the last by a permutation."""
    sets = list(itertools.combinations(range(numel), k))
    counts = dict.fromkeys(sets, 0)
    rounds = 200 * len(sets)
    for seed in range(rounds):
        counts[tuple(sorted(draw(numel, k, seed)))] += 1
    expected = rounds / len(sets)
    chi = sum((seen - expected) ** 2 / expected for seen in counts.values())
    freedom = len(sets) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_a_set_is_in_no_order_of_preference() -> None:
    """Whichever are dropped of too many, the first positions are as likely as the last."""
    found = torch.tensor([sum(draw(1000, 100, seed)) / 100 for seed in range(400)])
    assert abs(found.mean() - 499.5) < 4 * found.std() / 20


@pytest.mark.parametrize("cls", [RandomK, RandomMask, UnbiasedRandomK])
@pytest.mark.parametrize(
    ("scheme", "draws"), [(AllReduce(), 3), (AllGather(), 3), (TwoShot(), 9)], ids=repr
)
def test_a_round_draws_once(
    cls: type[RandomSparsifier], scheme: Scheme, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three workers for each tensor or shard; decoding takes what encoding has drawn."""
    drawn, seen = cls.drawn, []

    def counted(self: RandomSparsifier, numel: int, bucket: Bucket) -> torch.Tensor:
        seen.append(bucket.names)
        return drawn(self, numel, bucket)

    monkeypatch.setattr(cls, "drawn", counted)
    lockstep = Lockstep(3, cls(0.3), scheme=scheme)
    for step in range(2):
        lockstep.step([{"w": torch.ones(30), "v": torch.ones(12)}] * 3)
        assert len(seen) == 2 * draws * (step + 1)
