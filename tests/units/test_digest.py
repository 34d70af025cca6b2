"""A digest differs where a bit does, or its place; the error names the worker that is alone."""

import pytest
import torch

from lightning_gc.core.digest import ReplicaError, check_same, digest


@pytest.mark.parametrize("numel", [1, 3, 511, 512, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_every_bit_counts(numel: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(numel)
    content = torch.randint(256, (numel * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    before = int(digest(content.view(dtype)))
    assert before == int(digest(content.clone().view(dtype)))
    for at in torch.randint(content.numel(), (100,), generator=draw).tolist():
        changed = content.clone()
        changed[at] ^= 1 << at % 8
        assert int(digest(changed.view(dtype))) != before


def test_every_place_counts() -> None:
    """Also of numbers of few bits, whose sums often are the same."""
    numel, seen = 3000, set()
    for value in (1.0, 2.0, -0.0, float("inf")):
        for at in range(0, numel, 7):
            sparse = torch.zeros(numel)
            sparse[at] = value
            seen.add(int(digest(sparse)))
    assert len(seen) == 4 * len(range(0, numel, 7))


def test_two_that_change_places() -> None:
    one = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for first, second in ((0, 2), (0, 1024), (1, 2048), (5, 1031)):
        other = one.clone()
        other[[first, second]] = one[[second, first]]
        assert int(digest(other)) != int(digest(one))


def test_it_is_of_the_content_not_of_the_layout() -> None:
    whole = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(digest(whole.t()), digest(whole.t().contiguous()))
    assert torch.equal(digest(whole.view(-1)[1:]), digest(whole.view(-1)[1:].clone()))
    assert digest(torch.empty(0)).shape == (1,)
    assert not torch.equal(digest(whole, whole + 1), digest(whole + 1, whole))


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ([5, 5, 7], "worker 2 differs from the other 2"),
        ([7, 5, 5, 6, 5, 5], "workers 0, 3 differ from the other 4"),
        ([5, 7], "no majority agrees: 0 | 1"),
        ([5, 7, 7, 5], "no majority agrees: 0, 3 | 1, 2"),
    ],
)
def test_the_error_names_who_differs(digests: list[int], words: str) -> None:
    with pytest.raises(ReplicaError) as caught:
        check_same(digests, "the mean", "Stop.")
    assert str(caught.value) == f"Workers hold different bits of the mean: {words}. Stop."


@pytest.mark.parametrize("digests", [[3], [4, 4, 4]])
def test_equals_are_silent(digests: list[int]) -> None:
    check_same(digests, "the mean", "Stop.")
