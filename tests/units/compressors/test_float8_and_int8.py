"""Float8 and Int8 match their formulas in NumPy and torch's own formats."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import Float8, Int8
from lightning_gc.compressors import Codec
from lightning_gc.testing.contracts import cases
from tests.support import codecs
from tests.support.codecs import STUDENT, apply

KINDS = {
    **codecs.KINDS,
    "far from zero": 1e6 + STUDENT,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
FORMATS = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0), "1-3-4": (3, 4, 31.0)}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = torch.finfo(torch.float32).max


def representable(form: str) -> np.ndarray:
    """Return the finite numbers of a format of e exponent and m mantissa bits, as IEEE 754 does."""
    e, m, top = FORMATS[form]
    bias = 2 ** (e - 1) - 1
    numbers = [0.0]
    for exponent in range(2**e):
        for fraction in np.arange(2**m) / 2**m:
            if exponent == 0:
                numbers.append(2.0 ** (1 - bias) * fraction)
            else:
                numbers.append(2.0 ** (exponent - bias) * (1 + fraction))
    found = np.array([number for number in numbers if number <= top])
    return np.unique(np.concatenate([-found, found]))


def lost(codec: Codec, x: Tensor) -> float:
    """Return ``‖x − C(x)‖² / ‖x‖²``."""
    _, left, _ = apply(codec, x)
    return float((left.astype(np.float64) ** 2).sum() / x.double().square().sum())


@each_kind
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [7, 128, 512])
def test_float8_sends_the_nearest_number(kind: str, form: str, size: int) -> None:
    x = KINDS[kind].double().numpy()
    sent, _, (codes, scales) = apply(Float8(form, size), KINDS[kind])  # type: ignore[arg-type]
    assert codes.numel() == 300
    assert scales.numel() == math.ceil(300 / size)
    numbers, top = representable(form), FORMATS[form][2]
    for start in range(0, 300, size):
        block, got = x[start : start + size], sent[start : start + size]
        largest = np.abs(block).max()
        if largest == 0:
            assert not got.any()
            continue
        np.testing.assert_allclose(np.abs(got).max(), largest, rtol=0)
        wanted, found = block / largest * top, got / largest * top
        rounding = 1e-6 * np.abs(wanted)
        distances = np.abs(wanted[:, None] - numbers).min(1)
        assert (np.abs(np.abs(wanted - found) - distances) <= rounding).all()
        assert (np.abs(found[:, None] - numbers).min(1) <= 2 * rounding).all()
        assert ((np.sign(got) == np.sign(block)) | (got == 0)).all()


@each_kind
@pytest.mark.parametrize("form", TORCH)
def test_float8_codes_are_those_of_torch(kind: str, form: str) -> None:
    """Also halfway between two numbers, where the even code is taken."""
    x, top = KINDS[kind], FORMATS[form][2]
    numbers = torch.from_numpy(representable(form)).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    for tensor in (x, torch.cat([middles, numbers])):
        scale = tensor.abs().max().clamp_min(1e-45)
        _, _, (codes, _) = apply(Float8(form, 4096), tensor)  # type: ignore[arg-type]
        # Codes of -0 and of 0 stand for the same.
        theirs = (tensor / scale * top).to(TORCH[form]).view(torch.uint8)
        same = (codes == theirs) | ((codes | theirs) & 127 == 0)
        assert same.all(), (codes[~same], theirs[~same])


@pytest.mark.parametrize("form", FORMATS)
def test_float8_all_codes(form: str) -> None:
    """Any byte may arrive: those that no encoder sends become NaN, as all that is infinite."""
    out, codes = torch.zeros(256), torch.arange(256).to(torch.uint8)
    top = FORMATS[form][2]
    payload = (codes, torch.tensor([top]))
    Float8(form).decode(payload, out, 1.0, cases.bucket_of(out))  # type: ignore[arg-type]
    finite = out[out.isfinite()].double().numpy()
    np.testing.assert_allclose(np.unique(finite), representable(form), rtol=1e-6)
    if form in TORCH:
        theirs = codes.view(TORCH[form]).float()
        theirs = theirs.where(theirs.isfinite(), torch.nan)
        torch.testing.assert_close(out, theirs, equal_nan=True, rtol=1e-6, atol=0)
    else:
        assert len(finite) == 256


@pytest.mark.parametrize("form", FORMATS)
def test_float8_reaches_its_bound(form: str) -> None:
    """Elements that are rounded by half a step above a power of two; and too small ones."""
    _, m, top = FORMATS[form]
    middle = 1 + 2.0 ** -(m + 1)
    codec = Float8(form, 1 << 16)  # type: ignore[arg-type]
    powers = torch.full((300,), middle * 2.0 ** math.floor(math.log2(top) - 1) * (1 - 1e-6))
    x = torch.cat([torch.tensor([top]), powers])
    allowed = 1 - codec.bound(301).delta
    assert 0.9 * allowed < lost(codec, x) <= allowed * (1 + 1e-5)
    smallest = representable(form)
    smallest = smallest[smallest > 0].min()
    x = torch.full((1 << 16,), smallest * (0.5 - 1e-6))
    x[77] = top
    allowed = 1 - codec.bound(1 << 16).delta
    assert lost(codec, x) <= allowed * (1 + 1e-5)
    if form == "1-3-4":  # only there so many small elements are worse than half a step
        assert allowed > (1 / 33) ** 2
        assert lost(codec, x) > 0.99 * allowed


@each_kind
@pytest.mark.parametrize("size", [1, 7, 128, 512])
def test_int8(kind: str, size: int) -> None:
    x = KINDS[kind].double().numpy()
    sent, left, (codes, lows, highs) = apply(Int8(size), KINDS[kind])
    assert codes.numel() == 300
    assert lows.numel() == highs.numel() == math.ceil(300 / size)
    for start in range(0, 300, size):
        block, got = x[start : start + size], sent[start : start + size].astype(np.float64)
        low, high = block.min(), block.max()
        step, ulp = (high - low) / 255, 2.0**-22 * np.abs(block).max()
        grid = low + step * np.arange(256)
        np.testing.assert_allclose(np.abs(got[:, None] - grid).min(1), 0, atol=ulp)
        assert (np.abs(got - block) <= step / 2 * (1 + 1e-4) + ulp).all()
        assert got[block.argmin()] == low
        assert got[block.argmax()] == high
        np.testing.assert_allclose(left[start : start + size], block - got, rtol=1e-5, atol=ulp)


def test_int8_at_the_ends_of_the_range() -> None:
    """Between the least and the greatest number of all nothing overflows."""
    x = torch.linspace(-1, 1, 511).mul_(LARGEST).clamp_(-LARGEST, LARGEST)
    x[0], x[-1] = -LARGEST, LARGEST
    for tensor in (x, x[-200:].clone(), torch.full((9,), LARGEST), LARGEST - x.abs() * 1e-7):
        sent, left, _ = apply(Int8(), tensor)
        wide = tensor.double().numpy()
        step = (wide.max() - wide.min()) / 255
        assert (np.abs(sent.astype(np.float64) - wide) <= step * 0.501 + 1e-7 * LARGEST).all()
        assert np.isfinite(left).all()
        assert sent.max() == wide.max()
        assert sent.min() == wide.min()


def test_int8_reaches_its_bound() -> None:
    x = torch.zeros(512)
    x[0], x[1] = -1.0, 1.0
    allowed = 1 - Int8().bound(512).delta
    assert allowed == pytest.approx(510 / 130050, rel=2e-4)
    assert lost(Int8(), x) == pytest.approx(allowed, rel=2e-4)
    assert lost(Int8(), x) <= allowed
    assert Int8().bound(2).delta == 1
    assert Int8(65536).bound(10**9).delta > 0.49


@pytest.mark.parametrize("codec", [Float8(), Float8("1-3-4", 7), Int8(), Int8(7)], ids=str)
def test_pieces_change_nothing(codec: Codec) -> None:
    """A tensor that is coded in pieces, and each of its blocks alone, make the same codes."""
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    sent, _, payload = apply(codec, x)
    size = codec.block_size  # type: ignore[attr-defined]
    for start in (0, 130 * size, 200_003 // size * size):
        stop = start + size
        alone, _, (codes, *_) = apply(codec, x[start:stop])
        assert torch.equal(codes, payload[0][start:stop])
        np.testing.assert_array_equal(alone, sent[start:stop])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", [Float8(), Float8("e5m2"), Float8("1-3-4"), Int8()], ids=str)
def test_what_is_not_finite_shows(codec: Codec, bad: float) -> None:
    x = torch.ones(9)
    x[4] = bad
    assert not np.isfinite(apply(codec, x)[0]).all()


def test_double_precision() -> None:
    """Scales are float32 where elements are float64: the ends are then sent as float32 has them."""
    x = STUDENT.double() * (1 + 2.0**-30)
    for codec in (Float8(), Int8()):
        sent, left, _ = apply(codec, x)
        np.testing.assert_allclose(sent + left, x.numpy(), rtol=1e-12)
        allowed = codec.bound(300).allowed(float(x.square().sum()))
        assert (left**2).sum() <= allowed


def test_bad_arguments() -> None:
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match=r"elements must be 1 or more|size is a whole number"):
            Float8(block_size=size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"be a whole number in 1\.\.|size is a whole number"):
            Int8(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="65,536"):
        Int8(1 << 17)
    with pytest.raises(ValueError, match=r"'e3m4'.*use 'e4m3', 'e5m2' or '1-3-4'"):
        Float8("e3m4")  # type: ignore[arg-type]


def test_lengths_are_checked() -> None:
    x = torch.ones(9)
    for codec in (Float8(), Int8()):
        payload = codec.encode(x.clone(), cases.bucket_of(x))
        for i in range(len(payload)):
            wrong = [*payload]
            wrong[i] = torch.cat([wrong[i], wrong[i]])
            with pytest.raises(ValueError, match="another configuration"):
                codec.whole.receive(tuple(wrong), torch.zeros(9), 1.0, cases.bucket_of(x), 0)
