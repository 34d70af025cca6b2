"""The kernel that selects and compacts matches torch's operations."""

import pytest
import torch

from lightning_gc.kernels.dispatch import fused
from lightning_gc.kernels.select import reaching, reaching_reference, reference, select
from tests.support.kernel_device import DEVICE, here, marks, same, some, tensors

pytestmark = marks
BLOCK = 2048
SIZES = [1, 8, 9, BLOCK - 1, BLOCK, 2 * BLOCK + 5]


def agree(x, threshold) -> None:
    ours, theirs = here(x), x.clone()
    assert fused(ours)
    limit = here(threshold) if isinstance(threshold, torch.Tensor) else threshold
    assert same(reaching(ours, limit), reaching_reference(x, threshold))
    assert same(ours, x)
    found = select(ours, limit)
    wanted = reference(theirs, threshold)
    assert same(ours, theirs)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    assert bool((found[1][1:] > found[1][:-1]).all())


@pytest.mark.parametrize("numel", some(SIZES, (1, 9, 2 * BLOCK + 5)))
@pytest.mark.parametrize("name", tensors(1))
def test_every_kind_of_number(numel: int, name: str) -> None:
    for threshold in (0.0, 1.5):
        agree(tensors(numel)[name], threshold)


@pytest.mark.parametrize("numel", [BLOCK, 2 * BLOCK + 100])
def test_nothing_lost(numel: int) -> None:
    x = tensors(numel)["normal"]
    (wanted,) = (x.abs() >= 0.8).nonzero(as_tuple=True)
    left = here(x)
    values, positions = select(left, 0.8)
    assert positions.tolist() == wanted.tolist()
    assert torch.equal(left.index_add(0, positions, values).cpu(), x)


def test_a_threshold_that_the_host_does_not_know() -> None:
    x = tensors(100)["some of all"]
    for limit in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(float("nan"))):
        agree(x, limit)


def test_a_part_of_a_buffer() -> None:
    """As parameters lie in a bucket: at odd places, and what is beside stays."""
    whole = torch.arange(100.0, device=DEVICE)
    values, positions = select(whole[5:38], 19.0)
    assert positions.tolist() == list(range(14, 33))
    assert values.tolist() == [19.0 + i for i in range(19)]
    assert whole[:19].tolist() == list(range(19))
    assert whole[38] == 38
    assert not whole[19:38].any()


def test_results_do_not_vary() -> None:
    x = torch.randn(5 * BLOCK, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    first = select(x.clone(), 0.5)
    for _ in range(2):
        again = select(x.clone(), 0.5)
        assert all(same(a, b) for a, b in zip(first, again, strict=True))
