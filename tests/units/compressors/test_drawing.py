"""Positions drawn without replacement are distinct, complete, uniform, and a seed decides them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_gc import AllGather, AllReduce, RandomK, RandomMask, TwoShot, UnbiasedRandomK
from lightning_gc.compressors.sparsifiers.random_sparsifier import (
    RandomSparsifier,
    by_hash,
    positions,
)
from lightning_gc.core.bucket import Bucket
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep

CPU = torch.device("cpu")
WAYS = [positions, by_hash]  # of the host, and of every other device
Way = Callable[[int, int, int, torch.device], torch.Tensor]


def draw(way: Way, numel: int, k: int, seed: int) -> list[int]:
    return way(numel, k, seed, CPU).tolist()


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator's first numbers, as signed ones, in Python's integers."""
    word, numbers = seed, []
    for _ in range(count):
        mixed = word
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
        numbers.append(mixed - 2**64 if mixed >= 2**63 else mixed)
        word = (word + 0x9E3779B97F4A7C15) % 2**64
    return numbers


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_whole_numbers_decide_beside_the_host(seed: int) -> None:
    """So that GPUs of different models draw the same, whatever their own generators do."""
    numbers = splitmix64(seed, 700)
    expected = sorted(range(700), key=lambda i: -numbers[i])[:60]
    assert draw(by_hash, 700, 60, seed) == expected


@pytest.mark.parametrize("method", [RandomK(0.1), UnbiasedRandomK(0.1)], ids=repr)
def test_no_generator_of_a_gpu_is_asked(method) -> None:
    """Without CUDA there is none; pretended tensors suffice for all else."""
    with FakeTensorMode():
        bucket = Bucket(torch.zeros(5000, device="cuda"), {"weight": (5000,)}, seed=3)
        chosen = method.drawn(5000, bucket)
    assert chosen.device.type == "cuda"
    assert chosen.shape == (500,)


@pytest.mark.parametrize("way", WAYS)
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 2**62))
def test_k_different_ones(way: Way, numel: int, share: float, seed: int) -> None:
    k = min(numel, max(1, round(share * numel)))
    found = draw(way, numel, k, seed)
    assert len(set(found)) == len(found) == k
    assert min(found) >= 0
    assert max(found) < numel
    assert draw(way, numel, k, seed) == found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("numel", "k"), [(10, 2), (11, 1), (6, 3)])
def test_all_sets_are_equally_likely(way: Way, numel: int, k: int) -> None:
    """Chi-square over all sets, 4 standard deviations; the last by a permutation."""
    sets = list(itertools.combinations(range(numel), k))
    counts = dict.fromkeys(sets, 0)
    rounds = 200 * len(sets)
    for seed in range(rounds):
        counts[tuple(sorted(draw(way, numel, k, seed)))] += 1
    expected = rounds / len(sets)
    chi = sum((seen - expected) ** 2 / expected for seen in counts.values())
    freedom = len(sets) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("way", WAYS)
def test_a_set_is_in_no_order_of_preference(way: Way) -> None:
    """Whichever are dropped of too many, the first positions are as likely as the last."""
    found = torch.tensor([sum(draw(way, 1000, 100, seed)) / 100 for seed in range(400)])
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
