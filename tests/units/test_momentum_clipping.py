"""MomentumCorrection clips each worker's gradient by its norm, however large or small that is."""

import pytest
import torch

from lightning_gc import MomentumCorrection, TopK
from lightning_gc.testing import Lockstep


def clipped(gradient: torch.Tensor, clip: float) -> torch.Tensor:
    """Return what a single worker sends of its first gradient, all of it."""
    lockstep = Lockstep(1, TopK(1.0), MomentumCorrection(0.5, clip=clip))
    return lockstep.step([{"w": gradient}]).mean["w"]


@pytest.mark.parametrize("size", [1.0, 3e25, 3e38])
def test_a_large_finite_gradient_keeps_its_direction(size: float) -> None:
    """Its square is beyond float32 from 2e19 on, and at 3e38 its norm is too."""
    gradient = torch.tensor([[size, -size], [size, size / 2]])
    direction = torch.tensor([[1.0, -1.0], [1.0, 0.5]])
    expected = direction / torch.linalg.vector_norm(direction)
    torch.testing.assert_close(clipped(gradient, 0.5), 0.5 * expected)


@pytest.mark.parametrize("size", [0.0, 1e-30, 0.1])
def test_what_is_within_the_clip_is_left_as_it_is(size: float) -> None:
    gradient = torch.full((2, 2), size)
    assert clipped(gradient, 1.0).equal(gradient)


def test_a_small_clip_holds_for_a_gradient_whose_square_is_zero() -> None:
    gradient = torch.full((2, 2), 1e-30)
    torch.testing.assert_close(clipped(gradient, 1e-30), gradient / 2, rtol=1e-5, atol=0.0)


def test_a_parameter_without_elements_is_let_through() -> None:
    assert clipped(torch.zeros(0, 2), 1.0).shape == (0, 2)
