"""Positions drawn without replacement are distinct, complete and uniform."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.compressors.sparsifiers.random_sparsifier import positions


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
