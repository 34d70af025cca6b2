"""SVDThreshold sends the triplets that NumPy's SVD finds at or above the threshold."""

import numpy as np
import pytest
import torch

from lightning_gc import SVDThreshold
from lightning_gc.core.bucket import Bucket
from tests.support.codecs import KINDS, each_kind


@each_kind
@pytest.mark.parametrize("shape", [(15, 20), (20, 15), (300,)])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_triplets(kind: str, shape: tuple[int, ...], share: float) -> None:
    x = KINDS[kind]
    matrix = np.pad(x.double().numpy(), (0, 6)).reshape(17, 18) if len(shape) == 1 else None
    matrix = x.double().numpy().reshape(shape) if matrix is None else matrix
    u, values, vt = np.linalg.svd(matrix, full_matrices=False)
    # Between two values, so that rounding decides nothing.
    threshold = float(share * values[0] + (1 - share) * values[-1]) or 1.0
    if np.abs(values / threshold - 1).min() < 1e-3 or not 1e-37 < threshold < 1e38:
        return
    codec, bucket = SVDThreshold(threshold), Bucket(x, {"w": shape}, seed=1)
    buffer, out = x.clone(), torch.zeros_like(x)
    payload = codec.encode(buffer, bucket)
    codec.decode(payload, out, 1.0, bucket)
    count = int((values >= threshold).sum())
    wanted = (u[:, :count] * values[:count] @ vt[:count]).reshape(-1)[:300]
    if count * sum(matrix.shape) >= 300:  # as it is
        wanted = x.double().numpy()
        assert payload[0].numel() == 0
    else:
        assert payload[0].numel() == count * matrix.shape[0]
    scale = np.abs(x.numpy()).max()
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-4, atol=1e-5 * scale)
    np.testing.assert_allclose((buffer + out).numpy(), x.numpy(), rtol=1e-4, atol=1e-6 * scale)


def test_of_a_large_matrix_nothing_is_rounded_away() -> None:
    """The bound is absolute, and float32's rounding of 1e8 is above it."""
    x = 1e8 * torch.outer(KINDS["normal"][:15], KINDS["normal"][15:35]).view(-1)
    buffer = x.clone()
    SVDThreshold(1.0).encode(buffer, Bucket(x, {"w": (15, 20)}))
    assert float(buffer.norm()) <= SVDThreshold(1.0).bound(300).v


def test_refusals() -> None:
    with pytest.raises(ValueError, match="threshold=0"):
        SVDThreshold(0)
