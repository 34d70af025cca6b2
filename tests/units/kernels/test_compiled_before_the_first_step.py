"""No variant of a kernel is met in a step that has not been compiled before the first one."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gc import QSGD, HardThreshold, IntegerQSGD, TopK, Uniform
from lightning_gc.compressors import Compressor
from lightning_gc.exchange import configure
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.kernel_device import DEVICE, here, marks, some

pytestmark = marks
ALIGNED = {
    "sparse.scatter_add": set[str](),
    "levels.raise_peaks": set[str](),
    "levels.round_tiles": set[str](),
    "levels.average_tiles": set[str](),
    "segments.book_pieces": set[str](),
}
"""Kernels, and of which arguments it matters to Triton whether they are aligned."""

SHAPES = {"weight": (30, 41), "bias": (41,), "even": (32, 48), "last": (32, 32)}


class Recorded:
    """A kernel that notes what it is launched with, as far as there are variants for it."""

    def __init__(self, kernel: Any, aligned: set[str], seen: set[Any]) -> None:
        self.kernel, self.aligned, self.seen = kernel, aligned, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **constants: Any) -> None:
            named = dict(zip(self.kernel.arg_names, values, strict=False)) | constants
            kinds = tuple((name, self.kind(name, value)) for name, value in named.items())
            self.seen.add((id(self.kernel), kinds))
            self.kernel[grid](*values, **constants)

        return launch

    def kind(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, name in self.aligned and value.data_ptr() % 16 == 0
        if name in self.aligned:
            return value == 1, value % 16 == 0
        return value if name.isupper() else type(value)


@pytest.mark.parametrize(
    "compressor",
    [
        *some([QSGD(4), QSGD(9, 64), Uniform(8), IntegerQSGD(3)], [QSGD(4)]),
        *some([HardThreshold(0.5), TopK(0.1, "bfloat16")], [HardThreshold(0.5)]),
    ],
    ids=cases.label,
)
def test_all_are_known(compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Any] = set()
    for path, aligned in ALIGNED.items():
        module, name = path.split(".")
        family = importlib.import_module(f"lightning_gc.kernels.gpu.{module}")
        monkeypatch.setattr(family, name, Recorded(getattr(family, name), aligned, seen))
    lockstep = Lockstep(2, compressor)
    compile_kernels(configure("test", compressor, None, None, 0), torch.device(DEVICE))
    compiled = set(seen)
    assert compiled
    seen.clear()
    draw = cases.generator(0)
    named = [{n: here(torch.randn(s, generator=draw)) for n, s in SHAPES.items()} for _ in range(2)]
    lockstep.step(named)
    assert seen
    assert seen <= compiled
