"""The kernel that adds sparse payloads matches torch's index_add_."""

import pytest
import torch

from lightning_gc.kernels.accumulate import accumulate, reference
from lightning_gc.kernels.dispatch import fused
from tests.support.kernel_device import DEVICE, here, marks, narrow, same, tensors

pytestmark = marks


@pytest.mark.parametrize("numel", [1, 512, 1027])
@pytest.mark.parametrize("scale", [1.0, -1 / 3])
def test_any_number_anywhere(numel: int, scale: float) -> None:
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(numel))
    for chosen in {0, 1, numel // 3, numel}:
        positions = order[:chosen].sort().values
        for x in tensors(numel).values():
            for dtype in (torch.float32, torch.bfloat16):
                values = narrow(x.roll(1)[:chosen], dtype)
                ours, theirs = here(x), x.clone()
                assert fused(ours, "sparse")
                accumulate(ours, here(positions), here(values), scale)
                reference(theirs, positions, values, scale)
                assert same(ours, theirs)


def test_a_position_outside_is_not_written() -> None:
    """``payload_validation.positions`` lets none through; the kernel does not rely on it."""
    whole = torch.zeros(8, device=DEVICE)
    positions = torch.tensor([-3, 0, 4, 1 << 40], device=DEVICE)
    accumulate(whole[2:6], positions, torch.ones(4, device=DEVICE), 1.0)
    assert whole.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
