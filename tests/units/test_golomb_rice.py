"""Golomb-Rice codes survive the round trip, are as they are defined, and near the entropy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc.core.golomb_rice import decode, encode, low_bytes

pytestmark = pytest.mark.usefixtures("poisoned")
lists = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 5000)), min_size=1, max_size=60)


def bits_of(data: torch.Tensor) -> str:
    return "".join(f"{byte:08b}"[::-1] for byte in data.tolist())


def read(low_parts: torch.Tensor, high_parts: torch.Tensor, count: int, low: int) -> list[int]:
    """The definition, bit by bit: so many clear bits, a set one, and the low bits."""
    high, rest, numbers = iter(bits_of(high_parts)), bits_of(low_parts), []
    for i in range(count):
        quotient = 0
        while next(high) == "0":
            quotient += 1
        last = rest[i * low : (i + 1) * low]
        numbers.append((quotient << low) + int(last[::-1] or "0", 2))
    return numbers


@settings(max_examples=200)
@given(lists, st.integers(0, 14))
def test_there_and_back(numbers: list[int], low: int) -> None:
    count = len(numbers)
    low_parts, high_parts = encode(torch.tensor(numbers), low)
    assert low_parts.numel() == low_bytes(count, low) == low * math.ceil(count / 8)
    assert high_parts.numel() == math.ceil(sum((n >> low) + 1 for n in numbers) / 8)
    for look in (True, False):
        found = decode(low_parts, high_parts, count, low, 1 << 40, look)
        assert found.tolist() == numbers


@settings(max_examples=100)
@given(lists, st.integers(0, 7))
def test_as_written_down_bit_by_bit(numbers: list[int], low: int) -> None:
    low_parts, high_parts = encode(torch.tensor(numbers), low)
    assert read(low_parts, high_parts, len(numbers), low) == numbers


@pytest.mark.parametrize("mean", [1, 1.5, 2, 3, 4.5, 10, 33, 1000])
def test_near_the_entropy(mean: float) -> None:
    p = 1 / (1 + mean)
    numbers = np.random.default_rng(0).geometric(p, 50_000) - 1
    entropy = (-(1 - p) * math.log2(1 - p) - p * math.log2(p)) / p
    low = round(math.log2(max(1, np.median(numbers))))
    taken = 8 * sum(part.numel() for part in encode(torch.from_numpy(numbers), low))
    assert entropy - 0.05 < taken / 50_000 < entropy + 0.27


def test_nothing() -> None:
    low_parts, high_parts = encode(torch.zeros(0, dtype=torch.int64), 3)
    assert low_parts.numel() == high_parts.numel() == 0
    assert decode(low_parts, high_parts, 0, 3, 9, True).numel() == 0


def test_damaged_high_parts() -> None:
    """Refused where that can be seen, else all numbers are those that the caller refuses."""
    low_parts, high_parts = encode(torch.tensor([3, 0, 70, 5]), 2)
    for damaged in (high_parts | 1, high_parts * 0, high_parts[:-1], high_parts[:0]):
        with pytest.raises(ValueError, match=r"marks \d positions, but should mark 4"):
            decode(low_parts, damaged, 4, 2, 99, True)
        assert decode(low_parts, damaged, 4, 2, 99, False).tolist() == [99] * 4
    with pytest.raises(ValueError, match="take 2 bytes"):
        decode(low_parts[:1], high_parts, 4, 2, 99, True)
