"""Every kernel is tried before it is used: one that fails, or is wrong, is found by name."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from tests.support.kernel_device import DEVICE, marks

pytestmark = marks
KERNELS = [
    ("accumulate", "sparse", "scatter_add"),
    *(("levels", "levels", kernel) for kernel in ("raise_peaks", "round_tiles", "average_tiles")),
    ("block shards", "blocks", "book_pieces"),  # of three families, the first
    *(
        ("segments", "segments", kernel)
        for kernel in (
            *("largest", "move_pieces", "zero_if", "zero_non_finite"),
            *("take_pieces", "put_pieces"),
        )
    ),
    *(
        ("sparse", "sparse", kernel)
        for kernel in (
            *("sample_thresholds", "first_digit", "next_digit", "count_pieces", "count_reaching"),
            *("move_chosen", "code_positions", "count_bits", "find_places", "add_all"),
        )
    ),
    *(("casts", "casts", kernel) for kernel in ("round_pieces", "average_pieces")),
    *(("blocks", "blocks", name) for name in ("round_blocks", "average_blocks")),
    *(("signs", "signs", name) for name in ("sum_pieces", "take_signs", "average_signs")),
    *(("random_k", "random_k", name) for name in ("take_drawn", "put_drawn")),
    *(
        ("low_rank", "low_rank", kernel)
        for kernel in ("orthonormalise", "project_rows", "project_columns", "apply_factors")
    ),
]


FAMILIES = sorted({family for _, family, _ in KERNELS})


def home(kernel: str) -> Any:
    """Return the module that declares and launches a kernel."""
    package = importlib.import_module("lightning_gc.kernels.gpu")
    names = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    return next(module for name in names if kernel in vars(module := importlib.import_module(name)))


def self_test(family: str) -> None:
    importlib.import_module("lightning_gc.kernels.gpu").self_test(family, torch.device(DEVICE))


class DoesNothing:
    """In place of a kernel: launched on a grid, it leaves all memory as it is."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


class DoesNotCompile:
    def __getitem__(self, grid: Any) -> Any:
        raise TypeError("unsupported on this architecture")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_are_right(family: str) -> None:
    self_test(family)


def test_all_are_right_if_torch_multiplies_matrices_roughly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU after ``torch.set_float32_matmul_precision("high")``."""
    exact = torch.Tensor.__matmul__

    def roughly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float32:
            return exact(a, b)
        return exact(a.bfloat16().float(), b.bfloat16().float())

    monkeypatch.setattr(torch.Tensor, "__matmul__", roughly)
    self_test("low_rank")


@pytest.mark.parametrize(("operation", "family", "kernel"), KERNELS)
@pytest.mark.parametrize("fails", [DoesNotCompile, DoesNothing])
def test_one_that_fails_is_found(
    operation: str, family: str, kernel: str, fails: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left in memory was another tensor before; hence zeros, which are no result."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(home(kernel), kernel, fails())
    with pytest.raises(RuntimeError, match=f"^{operation}: ") as found:
        self_test(family)
    assert ("unsupported" in str(found.value)) == (fails is DoesNotCompile)
