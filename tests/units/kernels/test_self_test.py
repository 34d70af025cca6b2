"""Every kernel is tried before it is used: one that fails, or is wrong, is found by name."""

import importlib
from typing import Any

import pytest
import torch

from tests.support.kernel_device import DEVICE, marks

pytestmark = marks
KERNELS = [
    ("accumulate", "scatter_add"),
    ("select", "mark"),
    ("select", "compact"),
    ("quantise", "round_and_pack"),
    ("dequantise", "unpack_and_add"),
    ("segments", "largest"),
    ("segments", "move_pieces"),
    ("segments", "zero_if"),
    ("segments", "zero_non_finite"),
]


def kernels() -> Any:
    return importlib.import_module("lightning_gc.kernels.gpu.tensors")


class DoesNothing:
    """In place of a kernel: launched on a grid, it leaves all memory as it is."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


class DoesNotCompile:
    def __getitem__(self, grid: Any) -> Any:
        raise TypeError("unsupported on this architecture")


def test_all_are_right() -> None:
    kernels().self_test(torch.device(DEVICE))


@pytest.mark.parametrize(("operation", "kernel"), KERNELS)
@pytest.mark.parametrize("fails", [DoesNotCompile, DoesNothing])
def test_one_that_fails_is_found(
    operation: str, kernel: str, fails: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left in memory was another tensor before; hence zeros, which are no result."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(kernels(), kernel, fails())
    with pytest.raises(RuntimeError, match=f"^{operation}: ") as found:
        kernels().self_test(torch.device(DEVICE))
    assert ("unsupported" in str(found.value)) == (fails is DoesNotCompile)
