"""Coded positions survive the round trip, and are as short as promised."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.core import payload_validation
from lightning_gc.core.elias_fano import coded_bytes, decode, encode, most_bytes
from lightning_gc.core.segments import pieces_of
from lightning_gc.kernels import permutation

LARGE = 3 * 2**31 + 7
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
    assert sparse_codec.counts(2**31 - 1) == torch.int32
    assert sparse_codec.counts(LARGE) == torch.int64
    values = torch.zeros(1).expand(LARGE)
    (number,) = sparse_codec.Encoded((values,), LARGE).number
    assert number.tolist() == [LARGE]
    narrow = {True: torch.int8, False: torch.int64}
    monkeypatch.setattr(topk_selection, "counts", lambda numel: narrow[numel <= 100])
    for numel in (100, 300):
        equal = torch.ones(numel)
        assert topk_selection.largest(equal, 5).tolist() == [0, 1, 2, 3, 4]
        rows = topk_selection.largest_of_rows(equal.view(1, -1), 5)
        assert rows.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, LARGE, 2**46 + 12345])
def test_positions_above_int32_are_drawn(numel: int) -> None:
    """On a device the key is a tensor of int64, in which a product must not wrap."""
    key = 7 << 40 | 5
    drawn = permutation.first(numel, 3000, key, torch.device("cpu"), step=3)
    assert drawn.unique().numel() == 3000
    assert int(drawn.min()) >= 0
    assert numel // 2 < int(drawn.max()) < numel
    assert permutation.first(numel, 3000, torch.tensor(key), drawn.device, step=3).equal(drawn)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "without waits"])
def test_positions_above_int32_are_coded(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels count in int32: few elements of a large tensor are not theirs to decode."""
    found = torch.tensor([0, 2**31 - 1, 2**31, LARGE - 1])
    payload = torch.arange(4.0), sparse_codec.code(found, LARGE, torch.zeros(1))
    assert payload[1].equal(encode(found, LARGE))
    if not on_host:
        monkeypatch.setattr(sparse_codec, "compiled", lambda tensor, family: False)
        monkeypatch.setattr(sparse_codec, "fused", lambda tensor, family: True)
        monkeypatch.setattr(payload_validation, "on_host", lambda tensor: False)
    assert sparse_codec.places(payload, LARGE)[0].equal(found)


def test_tables_of_kernels_name_places_above_int32() -> None:
    device, end = torch.device("cpu"), 2**31 + 9
    assert pieces_of([(1, 2**31, end, LARGE)], device).tolist() == [[1, 2**31, end, LARGE]]
    signs = pytest.importorskip("lightning_gc.kernels.host.signs")
    fields = signs.Table([("w", 0, 0, LARGE)], "magnitude", device).fields
    assert fields == [(torch.uint8, -(-LARGE // 8)), (torch.float32, 1)]
