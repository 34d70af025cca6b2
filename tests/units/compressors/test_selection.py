"""Fast selection of large elements finds what torch's sort and comparison find."""

import pytest
import torch

from lightning_gc.compressors.sparsifiers import topk_selection


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 2**16 - 1, 2**16, 2**16 + 3, 600_001])
@pytest.mark.parametrize("threshold", [0.0, 1.5, 4.0, 1e9])
def test_reaching(numel: int, threshold: float) -> None:
    """All positions of magnitudes not below it, across pieces, NaN among them."""
    buffer = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if numel > 5:
        buffer[5] = float("nan")
        buffer[-1] = -threshold
    wanted = (buffer.abs() < threshold).logical_not().nonzero().view(-1)
    assert torch.equal(topk_selection.reaching(buffer, threshold), wanted)


@pytest.mark.parametrize(
    "kind", ["normal", "heavy", "zeros", "constant", "few", "sorted", "tiny", "nan"]
)
@pytest.mark.parametrize("k", [1, 10, 1000, 30_000, 100_000])
def test_largest(kind: str, k: int) -> None:
    """The same magnitudes as torch.topk's, each element once; ties may be broken otherwise."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(100_000, generator=g)
    buffer = {
        "normal": normal,
        "heavy": normal**5,
        "zeros": torch.zeros(100_000),
        "constant": torch.full((100_000,), -2.0),
        "few": torch.zeros(100_000).index_fill_(0, torch.arange(50) * 1999, 3.0),
        "sorted": normal.sort().values,
        "tiny": normal * 1e-30,
        "nan": normal.masked_fill(normal > 2, float("nan")),
    }[kind]
    found = topk_selection.largest(buffer, k)
    assert found.shape == (k,)
    assert bool((found[1:] > found[:-1]).all())
    wanted = torch.topk(buffer.abs(), k).values
    got = buffer[found].abs().sort(descending=True).values
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("zeros", [0.0, 0.4, 0.6, 0.999, 1.0])
@pytest.mark.parametrize("nans", [0, 3])
@pytest.mark.parametrize("k", [1, 5, 400, 1000])
def test_kth_largest(zeros: float, nans: int, k: int) -> None:
    """That of a sort, in which NaN comes first."""
    draw = torch.Generator().manual_seed(0)
    magnitudes = torch.rand(1000, generator=draw)
    magnitudes[torch.randperm(1000, generator=draw)[: int(zeros * 1000)]] = 0.0
    magnitudes[:nans] = float("nan")
    wanted = magnitudes.sort(descending=True).values[k - 1]
    found = topk_selection.kth_largest(magnitudes, k)
    assert torch.equal(found, wanted) or bool(found.isnan() and wanted.isnan())


@pytest.mark.parametrize("numel", [1, 100, 2**14, 2**14 + 1])
def test_small_tensors(numel: int) -> None:
    buffer = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    k = max(1, numel // 50)
    wanted = buffer.abs().sort(descending=True).indices[:k].sort().values
    assert torch.equal(topk_selection.largest(buffer, k), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    buffer = torch.randn(70_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(
        topk_selection.reaching(buffer, 1.5), (buffer.abs() >= 1.5).nonzero().view(-1)
    )
    found = topk_selection.largest(buffer, 700)
    least = torch.topk(buffer.abs(), 700).values[-1]
    assert (buffer[found].abs() >= least).all()
    assert len(found.unique()) == 700


@pytest.mark.parametrize("k", [0, 1, 3, 5, 9])
def test_best_takes_nan_first_and_equal_ones_up_to_k(k: int) -> None:
    nan = float("nan")
    buffer = torch.tensor([0.0, nan, 2.0, -2.0, nan, 1.0, 2.0, float("-inf"), 9.0])
    found = topk_selection.best(buffer, torch.arange(9), k)
    assert len(found) == k
    order = [{1, 4, 7}, {8}, {2, 3, 6}, {5}, {0}]  # NaN and infinity, then by magnitude
    assert set(found.tolist()) >= set().union(*[g for g in order if _before(order, g) <= k])


def _before(order: list[set[int]], group: set[int]) -> int:
    """Return how many elements are in this group and those before."""
    return sum(map(len, order[: order.index(group) + 1]))


@pytest.mark.parametrize("numel", [5, 300, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_equal_magnitudes_the_first_are_taken(numel: int, dtype: torch.dtype) -> None:
    """NaN is greater than all, and signs do not matter."""
    draw = torch.Generator().manual_seed(numel)
    buffer = torch.randn(numel, generator=draw).mul(2).round().clamp(-2, 2).to(dtype)
    buffer[numel // 2] = float("nan")
    order = buffer.abs().sort(descending=True, stable=True).indices
    for k in {0, 1, 2, numel // 7, numel // 2, numel - 1, numel}:
        assert torch.equal(topk_selection.largest(buffer, k), order[:k].sort().values)
