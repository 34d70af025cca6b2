"""Positions drawn without replacement are distinct, complete, uniform, and a seed decides them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_gc import AllGather, AllReduce, RandomK, RandomMask, TwoShot
from lightning_gc.compressors.sparsifiers import random_sparsifier
from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier, positions
from lightning_gc.core.bucket import Bucket
from lightning_gc.kernels.permutation import first
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep

CPU = torch.device("cpu")
PINNED = [99, 310, 123, 104, 552, 295, 420, 641]
WAYS = [positions, first]  # of the host, and of every other device
Way = Callable[[int, int, int, torch.device], torch.Tensor]


def draw(way: Way, numel: int, k: int, seed: int) -> list[int]:
    return way(numel, k, seed, CPU).tolist()


@pytest.mark.parametrize("numel", [1, 2, 3, 5, 8, 100, 1023, 1024, 1025, 65_537])
def test_a_permutation(numel: int) -> None:
    for key in (0, 1, 2**63 - 1):
        assert sorted(draw(first, numel, numel, key)) == list(range(numel))


def test_whole_numbers_decide_beside_the_host() -> None:
    """So that GPUs of different models draw the same; other numbers would break old runs."""
    assert draw(first, 700, 8, 2**63 - 1) == PINNED
    seed = torch.tensor([2**63 - 1])
    assert torch.equal(first(700, 8, seed, CPU, step=3), first(700, 8, 2**63 - 1, CPU, step=3))


def test_each_step_draws_others_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_sparsifier, "by_generator", lambda device: False)
    buckets = [Bucket(torch.zeros(500), {"w": (500,)}, step=step) for step in (0, 1)]
    one, other = (set(RandomK(0.1).drawn(500, bucket).tolist()) for bucket in buckets)
    assert len(one & other) < 25 < len(one) == len(other)


@pytest.mark.parametrize(
    "numel", [17, *(pytest.param(n, marks=pytest.mark.nightly) for n in (100, 1000, 65_537))]
)
@pytest.mark.parametrize("by", ["key", "step"])
def test_places_and_pairs_are_uniform(numel: int, by: str) -> None:
    """Chi-square of places, and of pairs of places, in eight bins; 4 standard deviations."""
    rounds, bins, k = 6_000, 8, 12
    found = torch.stack(
        [
            first(numel, k, 7919 * i if by == "key" else 5, CPU, step=i if by == "step" else 0)
            for i in range(rounds)
        ]
    )
    size = torch.bincount(torch.arange(numel) * bins // numel).double()
    one, other = (found[:, i] * bins // numel for i in (1, 10))
    both = torch.bincount(one * bins + other, minlength=bins * bins).view(bins, bins)
    pairs = (size.outer(size) - size.diag()) * rounds / (numel * (numel - 1))
    for seen, expected in ((both.sum(1), size * rounds / numel), (both, pairs)):
        freedom = seen.numel() - 1
        chi = ((seen - expected) ** 2 / expected).sum()
        assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("method", [RandomK(0.1), RandomK(0.1, unbiased=True)], ids=repr)
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
@pytest.mark.parametrize(
    ("numel", "k"), [pytest.param(10, 2, marks=pytest.mark.nightly), (11, 1), (6, 3)]
)
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


@pytest.mark.parametrize(
    "method", [RandomK(0.3), RandomMask(0.3), RandomK(0.3, unbiased=True)], ids=repr
)
@pytest.mark.parametrize(
    ("scheme", "draws"), [(AllReduce(), 3), (AllGather(), 3), (TwoShot(), 9)], ids=repr
)
def test_a_round_draws_once(
    method: RandomSparsifier, scheme: Scheme, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three workers for each tensor or shard; decoding takes what encoding has drawn."""
    drawn, seen = RandomSparsifier.drawn, []

    def counted(self: RandomSparsifier, numel: int, bucket: Bucket) -> torch.Tensor:
        seen.append(bucket.names)
        return drawn(self, numel, bucket)

    monkeypatch.setattr(RandomSparsifier, "drawn", counted)
    lockstep = Lockstep(3, method, scheme=scheme)
    for step in range(2):
        lockstep.step([{"w": torch.ones(30), "v": torch.ones(12)}] * 3)
        assert len(seen) == 2 * draws * (step + 1)
