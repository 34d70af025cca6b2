"""MXFP4, MXFP8 and NVFP4 are what their specifications say, which NumPy computes."""

import numpy as np
import pytest
import torch

from lightning_gc import MXFP4, MXFP8, NVFP4
from lightning_gc.compressors.quantisers.minifloat import Minifloat
from tests.support.codecs import KINDS, apply, each_kind

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def finite(dtype: torch.dtype) -> np.ndarray:
    """The non-negative numbers of one of torch's formats, ascending; the place is the code."""
    known = torch.arange(127, dtype=torch.uint8).view(dtype).double()
    found: np.ndarray = known[known.isfinite()].numpy()
    return found


def nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The nearest of ``numbers``, at a tie the one with the even code; no more than the largest."""
    distances = np.abs(np.abs(x)[..., None] - numbers)
    ties = distances == distances.min(-1, keepdims=True)
    even = ties & (np.arange(len(numbers)) % 2 == 0)
    chosen = np.where(even.any(-1), even.argmax(-1), ties.argmax(-1))
    return np.copysign(numbers[chosen], x)


def blocks(x: torch.Tensor, size: int) -> list[np.ndarray]:
    return [part.double().numpy() for part in x.split(size)]


def microscaled(x: torch.Tensor, numbers: np.ndarray) -> np.ndarray:
    """Section 6.3 of the specification, with the least exponent that float32 has."""
    emax, parts = np.floor(np.log2(numbers[-1])), []
    for block in blocks(x, 32):
        largest = np.abs(block).max()
        exponent = np.floor(np.log2(largest)) - emax if largest else -126.0
        unit = 2.0 ** max(exponent, -126.0)
        parts.append(unit * nearest(block / unit, numbers))
    return np.concatenate(parts)


def two_levels(x: torch.Tensor) -> np.ndarray:
    largest = float(x.abs().max())
    unit = 2.0 ** max(np.ceil(np.log2(largest / 2688)), -126.0) if largest else 1.0
    scales, parts = finite(torch.float8_e4m3fn), []
    for block in blocks(x, 16):
        scale = float(nearest(np.abs(block).max(keepdims=True) / unit / 6, scales)[0])
        parts.append(unit * scale * nearest(block / unit / scale, E2M1) if scale else 0 * block)
    return np.concatenate(parts)


CASES = {
    MXFP4(): lambda x: microscaled(x, E2M1),
    MXFP8(): lambda x: microscaled(x, finite(torch.float8_e4m3fn)),
    MXFP8("e5m2"): lambda x: microscaled(x, finite(torch.float8_e5m2)),
    NVFP4(): two_levels,
}


@each_kind
@pytest.mark.parametrize("codec", CASES, ids=repr)
def test_as_specified(kind: str, codec: Minifloat) -> None:
    x = KINDS[kind]
    sent, left, payload = apply(codec, x)
    assert (sent == CASES[codec](x).astype(np.float32)).all()
    assert np.allclose(sent + left, x.numpy(), rtol=1e-6, atol=0)
    scales = payload[1]
    assert scales.dtype == torch.uint8
    assert scales.numel() == -(-300 // codec.block_size)


def test_bits_of_an_element() -> None:
    for codec, bits in ((MXFP4(), 4.25), (MXFP8(), 8.25), (NVFP4(), 4.5)):
        fields = codec.wire(1 << 20)
        assert 8 * sum(field.nbytes for field in fields) / (1 << 20) == pytest.approx(bits, 1e-4)


def test_what_is_sent_of_small_blocks() -> None:
    """The tensor's scale leaves e4m3's range to a block, and below it zeros."""
    x = torch.cat([torch.full((16,), 1e-4**i) for i in range(3)])
    sent, _, _ = apply(NVFP4(), x)
    assert np.allclose(sent[:32], x[:32], rtol=1 / 16)
    assert not sent[32:].any()
