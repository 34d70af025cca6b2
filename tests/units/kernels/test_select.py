"""The kernels that find large elements match torch's operations."""

import pytest
import torch

from lightning_gc.compressors.sparsifiers.topk_selection import reaching, reaching_reference
from lightning_gc.kernels.dispatch import fused
from tests.support.kernel_device import DEVICE, here, marks, same, some, tensors

pytestmark = marks
BLOCK = 2048
SIZES = [1, 8, 9, BLOCK - 1, BLOCK, 2 * BLOCK + 5]


def agree(x, threshold) -> None:
    ours = here(x)
    assert fused(ours, "tensors")
    limit = here(threshold) if isinstance(threshold, torch.Tensor) else threshold
    assert same(reaching(ours, limit), reaching_reference(x, threshold))
    assert same(ours, x)


@pytest.mark.parametrize("numel", some(SIZES, (1, 9, 2 * BLOCK + 5)))
@pytest.mark.parametrize("name", tensors(1))
def test_every_kind_of_number(numel: int, name: str) -> None:
    for threshold in (0.0, 1.5):
        agree(tensors(numel)[name], threshold)


def test_a_threshold_that_the_host_does_not_know() -> None:
    x = tensors(100)["some of all"]
    for limit in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(float("nan"))):
        agree(x, limit)


def test_a_part_of_a_buffer() -> None:
    """As parameters lie in a bucket: at odd places."""
    whole = torch.arange(100.0, device=DEVICE)
    assert reaching(whole[5:38], 19.0).tolist() == list(range(14, 33))


def test_results_do_not_vary() -> None:
    x = torch.randn(5 * BLOCK, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    first = reaching(x, 0.5)
    assert all(same(first, reaching(x, 0.5)) for _ in range(2))
