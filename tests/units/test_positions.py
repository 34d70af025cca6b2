"""Coded positions survive the round trip, and are as short as promised."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.core.elias_fano import coded_bytes, decode, encode, most_bytes
from lightning_gc.kernels import permutation

pytestmark = pytest.mark.usefixtures("poisoned")


@st.composite
def chosen(draw: st.DrawFn) -> tuple[list[int], int]:
    numel = draw(st.integers(1, 3000))
    return sorted(draw(st.sets(st.integers(0, numel - 1), max_size=numel))), numel


@settings(max_examples=300)
@given(chosen())
def test_there_and_back(case: tuple[list[int], int]) -> None:
    positions, numel = case
    coded = encode(torch.tensor(positions, dtype=torch.int64), numel)
    assert coded.shape == (coded_bytes(len(positions), numel),)
    assert decode(coded, len(positions), numel).tolist() == positions


@settings(max_examples=100)
@given(chosen())
def test_as_written_down_bit_by_bit(case: tuple[list[int], int]) -> None:
    """The definition: low bits one after the other, then a unary bitmap of what is left."""
    positions, numel = case
    if not positions:
        return
    low = int(math.log2(numel // len(positions)))
    bits = [1 << (p >> low) + i for i, p in enumerate(positions)]
    length = -(-(len(positions) + ((numel - 1) >> low) + 1) // 8)
    tail = sum(bits).to_bytes(length, "little")
    coded = bytes(encode(torch.tensor(positions), numel).tolist())
    assert coded[len(coded) - length :] == tail
    if low == 8:
        assert coded[: len(positions)] == bytes(p & 255 for p in positions)


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 10**6, 25_000_000])
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.1, 0.3, 1.0])
def test_its_length_is_what_is_promised(numel: int, density: float) -> None:
    k = max(1, round(density * numel))
    p = k / numel
    entropy = numel * (-p * math.log2(p) - (1 - p) * math.log2(1 - p) if p < 1 else 0)
    bits = 8 * coded_bytes(k, numel)
    assert bits <= k * (2 + math.log2(numel / k)) + 24
    assert bits >= entropy - 1


def test_no_number_of_positions_takes_more_than_all() -> None:
    """Nor do up to so many take more than wire formats say."""
    for numel in (1, 2, 9, 64, 100, 1000):
        sizes = [coded_bytes(k, numel) for k in range(numel + 1)]
        assert sizes[-1] <= max(sizes) <= most_bytes(numel)
        for most, size in enumerate(sizes):
            assert sparse_codec.positions_field(most, numel, "no").length == size
            longest = max(sizes[: most + 1])
            assert longest <= sparse_codec.positions_field(most, numel, "worker").length


def test_without_waiting_for_a_device() -> None:
    """The other branch, which searches in running sums, finds the same."""
    positions = torch.tensor([0, 3, 4, 99, 512, 999])
    coded = encode(positions, 1000)
    assert decode(coded, 6, 1000, look=False).tolist() == positions.tolist()
    assert (decode(torch.zeros_like(coded), 6, 1000, look=False) >= 0).all()
    assert (decode(torch.full_like(coded, 255), 6, 1000, look=False) >= 0).all()


def test_more_elements_than_int32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With int8 and 100 elements as the narrow count, 300 equal magnitudes would wrap."""
    assert topk_selection._counts(2**31 - 1) == torch.int32
    assert topk_selection._counts(2**31) == torch.int64
    with pytest.raises(ValueError, match=r"2147483648 elements: .* below 2\*\*31; split"):
        permutation.first(2**31, 3, 7, torch.device("cpu"))
    narrow = {True: torch.int8, False: torch.int64}
    monkeypatch.setattr(topk_selection, "_counts", lambda numel: narrow[numel <= 100])
    for numel in (100, 300):
        equal = torch.ones(numel)
        assert topk_selection.largest(equal, 5).tolist() == [0, 1, 2, 3, 4]
        rows = topk_selection.largest_of_rows(equal.view(1, -1), 5)
        assert rows.tolist() == [0, 1, 2, 3, 4]
