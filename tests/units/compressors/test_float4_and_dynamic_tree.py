"""Float4 and DynamicTree send the nearest of their formats' numbers, which NumPy lists."""

import math

import numpy as np
import pytest
import torch

from lightning_gc import DynamicTree, Float4
from lightning_gc.compressors import Codec
from tests.support.codecs import KINDS, apply, each_kind

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E3M0 = np.array([0, 1, 2, 4, 8, 16, 32, 64])


def tree() -> np.ndarray:
    """The 256 values from their bits: sign, zeros that count decades, a one, a linear fraction."""
    found = []
    for code in range(256):
        sign, rest = -1 if code >> 7 else 1, code & 127
        if rest == 0:
            found.append(0.0 if sign > 0 else 1.0)
            continue
        fraction_bits = rest.bit_length() - 1
        fraction = rest - (1 << fraction_bits)
        share = 0.1 + 0.9 * (fraction + 0.5) / (1 << fraction_bits)
        found.append(sign * share * 10.0 ** (fraction_bits - 6))
    return np.sort(found)


@each_kind
@pytest.mark.parametrize("size", [7, 64, 512])
@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda size: Float4("e2m1", size), np.concatenate([-E2M1[1:], E2M1]) / 6),
        (lambda size: Float4("e3m0", size), np.concatenate([-E3M0[1:], E3M0]) / 64),
        (lambda size: DynamicTree(size), tree()),
    ],
    ids=["e2m1", "e3m0", "tree"],
)
def test_each_element_is_the_nearest(
    kind: str, size: int, make: type[Codec], numbers: np.ndarray
) -> None:
    x = KINDS[kind].double().numpy()
    codec = make(size)  # type: ignore[call-arg]
    sent, left, (codes, scales) = apply(codec, KINDS[kind])
    assert codes.numel() == (150 if isinstance(codec, Float4) else 300)
    assert scales.numel() == math.ceil(300 / size)
    for start in range(0, 300, size):
        block, got = x[start : start + size], sent[start : start + size].astype(np.float64)
        largest = np.abs(block).max()
        if largest == 0:
            assert not got.any()
            continue
        shares, found = block / largest, got / largest
        distances = np.abs(shares[:, None] - numbers).min(1)
        assert (np.abs(found[:, None] - numbers).min(1) <= 1e-6 * np.abs(found)).all()
        assert (np.abs(shares - found) <= distances + 2e-6 * np.abs(shares)).all()
    np.testing.assert_allclose(left, x - sent, rtol=1e-4, atol=1e-6 * np.abs(x).max())


@pytest.mark.parametrize(("form", "numbers"), [("e2m1", E2M1), ("e3m0", E3M0)])
def test_middles(form: str, numbers: np.ndarray) -> None:
    """To the even code; where there is no mantissa, up, but for half the smallest number."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    even = np.where(np.arange(7) % 2 == 0, numbers[:-1], numbers[1:])
    wanted = even if form == "e2m1" else np.append(0, numbers[2:])
    x = torch.tensor([*middles, numbers[-1]]).float()
    sent, _, _ = apply(Float4(form, 64), x)  # type: ignore[arg-type]
    np.testing.assert_array_equal(sent[:-1], wanted)


def test_bounds_are_reached() -> None:
    """Elements all alike at the middle where it is worst, beside the largest."""
    for codec, middle in ((Float4("e2m1", 64), 1 / 4 - 1e-6), (Float4("e3m0", 64), 1.5 - 1e-6)):
        top = 6.0 if codec.format == "e2m1" else 64.0
        x = torch.full((64,), middle if codec.format == "e2m1" else 48 - 1e-3)
        x[0] = top
        _, left, _ = apply(codec, x)
        lost = float((left.astype(np.float64) ** 2).sum() / x.double().square().sum())
        allowed = 1 - codec.bound(64).delta
        assert lost <= allowed
        assert lost >= 0.35 * allowed


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"format='e4m3'.*'e2m1' or 'e3m0'"):
        Float4("e4m3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_size"):
        DynamicTree(0)
