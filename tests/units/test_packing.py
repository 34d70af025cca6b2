"""Packed integers match bit strings made by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.core.bit_packing import pack, packed_bytes, unpack

pytestmark = pytest.mark.usefixtures("poisoned")


def planes_by_hand(codes: list[int], bits: int) -> bytes:
    """The format as its docstring has it: byte planes, then a plane of the remaining bits."""
    whole, rest = divmod(bits, 8)
    result = b"".join(bytes((code >> (8 * i)) & 255 for code in codes) for i in range(whole))
    string = 0
    for i, code in enumerate(codes):
        string |= ((code >> (8 * whole)) & ((1 << rest) - 1)) << (i * rest)
    return result + string.to_bytes(-(-len(codes) * rest // 8), "little")


@given(st.data(), st.integers(1, 33))
def test_format_and_round_trip(data: st.DataObject, bits: int) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    packed = pack(torch.tensor(codes, dtype=torch.int64), bits)
    assert bytes(packed.tolist()) == planes_by_hand(codes, bits)
    assert packed.numel() == packed_bytes(len(codes), bits)
    assert unpack(packed, bits, len(codes)).tolist() == codes


@pytest.mark.parametrize(("numel", "bits", "nbytes"), [(1000, 3, 375), (8, 20, 20), (3, 1, 1)])
def test_three_bits_cost_three_bits(numel: int, bits: int, nbytes: int) -> None:
    assert packed_bytes(numel, bits) == nbytes
