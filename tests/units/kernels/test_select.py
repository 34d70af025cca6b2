"""The kernel that compensates, selects and compacts matches torch's operations."""

import pytest
import torch

from lightning_gc.kernels.dispatch import fused
from lightning_gc.kernels.select import reaching, reaching_reference, reference, select
from tests.support.kernel_device import DEVICE, here, marks, narrow, same, some, tensors

pytestmark = marks
BLOCK = 2048
SIZES = [1, 8, 9, BLOCK - 1, BLOCK, 2 * BLOCK + 5]


def agree(gradient, error, threshold, capacity) -> None:
    ours, theirs = here(error), error.clone()
    assert fused(ours)
    moved = None if gradient is None else here(gradient)
    limit = here(threshold) if isinstance(threshold, torch.Tensor) else threshold
    found = select(moved, ours, limit, capacity)
    wanted = reference(gradient, theirs, threshold, capacity)
    assert same(ours, theirs)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    room = found.values.numel() if capacity is None else capacity
    assert found.positions.shape == found.values.shape == (room,)
    taken = found.positions[: min(room, int(found.reached))]
    assert bool((taken[1:] > taken[:-1]).all())


@pytest.mark.parametrize("numel", some(SIZES, (1, 9, 2 * BLOCK + 5)))
@pytest.mark.parametrize("name", tensors(1))
def test_every_kind_of_number(numel: int, name: str) -> None:
    x = tensors(numel)[name]
    for threshold in (0.0, 1.5):
        agree(x, torch.ones(numel), threshold, None)
        agree(None, x, threshold, max(1, numel // 10))
        found = reaching(here(x), threshold)
        assert same(found, reaching_reference(x, threshold))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, BLOCK + 9])
def test_narrow_gradients_are_added_in_float32(dtype: torch.dtype, numel: int) -> None:
    for gradient in tensors(numel).values():
        error = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3
        agree(narrow(gradient, dtype), error, 1.0, numel // 3)


@pytest.mark.parametrize("numel", [BLOCK, 2 * BLOCK + 100])
def test_never_more_than_the_capacity_and_nothing_lost(numel: int) -> None:
    gradient = tensors(numel)["normal"]
    (wanted,) = (gradient.abs() >= 0.8).nonzero(as_tuple=True)
    k = wanted.numel()
    for capacity in (0, 1, k - 1, k, k + 1, numel + 3):
        agree(gradient, torch.zeros(numel), 0.8, capacity)
        error = torch.zeros(numel, device=DEVICE)
        values, positions, reached = select(here(gradient), error, 0.8, capacity)
        taken = min(k, capacity)
        assert int(reached) == k
        assert positions[:taken].tolist() == wanted[:taken].tolist()
        assert positions[taken:].eq(numel).all()
        assert not values[taken:].any()
        assert torch.equal(error.index_add(0, positions[:taken], values[:taken]).cpu(), gradient)


def test_a_threshold_that_the_host_does_not_know() -> None:
    x = tensors(100)["some of all"]
    for limit in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(float("nan"))):
        agree(None, x, limit, 50)


def test_a_part_of_a_buffer() -> None:
    """As parameters lie in a bucket: at odd places, and what is beside stays."""
    whole = torch.arange(100.0, device=DEVICE)
    values, positions, _ = select(torch.ones(33, device=DEVICE), whole[5:38], 20.0, 40)
    assert positions[0] == 14
    assert values[:19].tolist() == [20.0 + i for i in range(19)]
    assert whole[:5].tolist() == [0, 1, 2, 3, 4]
    assert whole[38] == 38
    assert not whole[19:38].any()


def test_results_do_not_vary() -> None:
    x = torch.randn(5 * BLOCK, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    first = select(None, x.clone(), 0.5, 1000)
    for _ in range(2):
        again = select(None, x.clone(), 0.5, 1000)
        assert all(same(a, b) for a, b in zip(first, again, strict=True))
