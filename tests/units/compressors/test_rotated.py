"""Rotated multiplies by the Hadamard matrix, as NumPy's Kronecker products build it."""

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, EFSignSGD, Rotated, TopK
from lightning_gc.compressors.quantisers import rotated
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, apply, each_kind


def matrix(numel: int, size: int, seed: int) -> np.ndarray:
    """Return ``H·D/√n`` of all runs, ``(numel, numel)``."""
    whole, start, n = np.zeros((numel, numel)), 0, size
    while start < numel:
        while numel - start >= n:
            hadamard = np.ones((1, 1))
            while len(hadamard) < n:
                hadamard = np.kron(hadamard, np.array([[1, 1], [1, -1]]))
            whole[start : start + n, start : start + n] = hadamard / np.sqrt(n)
            start += n
        n //= 2
    signs = rotated._signs(torch.ones(numel, dtype=torch.float64), seed).numpy()
    assert set(signs) == {-1.0, 1.0}
    product: np.ndarray = whole * signs
    return product


@pytest.mark.parametrize("size", [2, 16, 64, 1024])
def test_the_rotation_and_its_inverse(size: int) -> None:
    x = KINDS["Student t, 2 degrees"].double()
    rotation = matrix(300, size, 5)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(300), atol=1e-12)
    signs = rotated._signs(x, 5)
    turned = rotated.rotate(x.clone(), signs, size)
    np.testing.assert_allclose(turned.numpy(), rotation @ x.numpy(), atol=1e-9)
    back = rotated.rotate_back(turned, signs, size)
    np.testing.assert_allclose(back.numpy(), x.numpy(), atol=1e-9)


@each_kind
def test_what_is_sent_is_the_rotated_back_quantisation(kind: str) -> None:
    """With signs, whose result NumPy finds easily."""
    x = KINDS[kind].double().numpy()
    bucket = rotated._rotated(cases.bucket_of(KINDS[kind], workers=8))
    rotation = matrix(300, 64, bucket.generator_seed(shared=True))
    turned = rotation @ x
    wanted = rotation.T @ (np.abs(turned).mean() * np.where(turned >= 0, 1, -1))
    sent, left, _ = apply(
        Rotated(EFSignSGD(), 64), KINDS[kind], bucket=cases.bucket_of(KINDS[kind], workers=8)
    )
    np.testing.assert_allclose(left, x - sent, rtol=1e-4, atol=1e-6 * np.abs(x).max())
    if kind not in ("zeros", "one element", "constant"):  # elements that are zero up to rounding
        np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-5 * np.abs(x).max())


def test_a_single_large_element_costs_less() -> None:
    """In one block the others would hardly be told from zero."""
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    x[100] = 300.0
    plain, turned = (
        np.mean([np.square(apply(codec, x, step=s)[1]).sum() for s in range(20)])
        for codec in (QSGD(4, 1024), Rotated(QSGD(4, 1024)))
    )
    assert turned < 0.5 * plain


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"quantiser=TopK"):
        Rotated(TopK(0.1))
    with pytest.raises(ValueError, match="size=100"):
        Rotated(size=100)
