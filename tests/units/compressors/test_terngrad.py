"""TernGrad with independent scales matches its formula in NumPy; five trits share a byte."""

import numpy as np
import pytest
import torch

from lightning_gc import TernGrad
from lightning_gc.compressors import Codec
from lightning_gc.compressors.quantisers import terngrad
from tests.support.codecs import KINDS, apply, each_kind


def own_scales(clip: float | None) -> Codec:
    codec = TernGrad(clip, shared=False).inner
    assert isinstance(codec, Codec)
    return codec


@each_kind
@pytest.mark.parametrize("clip", [None, 2.5, 0.5])
def test_signs_and_scale(kind: str, clip: float | None) -> None:
    x = KINDS[kind].double().numpy()
    sigma = np.sqrt((x**2).mean())
    scale = np.abs(x).max() if clip is None else min(np.abs(x).max(), clip * sigma)
    sent, left, (packed, own) = apply(own_scales(clip), KINDS[kind])
    np.testing.assert_allclose(own.numpy(), scale, rtol=1e-6)
    assert packed.numel() == 60
    assert set(np.unique(sent)) <= {-own.numpy()[0], 0.0, own.numpy()[0]}
    assert (sent * x >= 0).all()
    np.testing.assert_allclose(left, x - sent, rtol=1e-4, atol=1e-6 * np.abs(x).max())


def test_probabilities() -> None:
    """``|y_i| / s``, of the clipped element and its worker's own scale."""
    x = KINDS["normal"]
    limit = 0.5 * float(x.square().mean().sqrt())
    clipped = np.clip(x.numpy(), -limit, limit)
    draws = np.mean([apply(own_scales(0.5), x, step=step)[0] for step in range(800)], 0)
    sigma = np.sqrt(np.abs(clipped) * (np.abs(clipped).max() - np.abs(clipped)) / 800)
    assert (np.abs(draws - clipped) <= 4.5 * sigma + 4 * limit / 800).all()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 243])
def test_trits_are_digits(count: int) -> None:
    given = np.random.default_rng(count).integers(0, 3, count)
    packed = terngrad.pack(torch.tensor(given, dtype=torch.uint8))
    for number, byte in enumerate(packed.tolist()):
        digits = given[5 * number : 5 * number + 5]
        assert byte == sum(int(d) * 3**i for i, d in enumerate(digits))
    found, _ = terngrad.unpack(packed, count, torch.ones(1))
    assert found.tolist() == given.tolist()


def test_a_byte_that_no_sender_makes() -> None:
    with pytest.raises(ValueError, match="code 243"):
        terngrad.unpack(torch.tensor([243], dtype=torch.uint8), 5, torch.ones(1))
