"""Where kernels run in these tests: on a GPU if there is one, else in Triton's interpreter.

The interpreter must be chosen before triton is imported, which torch and Lightning do by
themselves. So `tests/units/test_kernel_interpreter.py` runs those tests in a process of its own.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_gc.kernels import dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

needs_kernels = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or DEVICE == "cuda"),
    reason="needs triton and a GPU, or TRITON_INTERPRET=1: see test_kernel_interpreter.py",
)
marks_anywhere = [
    pytest.mark.usefixtures("poisoned", "fused_once"),
    # The interpreter computes with numpy, which warns of what floats do.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
marks = [needs_kernels, *marks_anywhere]


def some(numbers: Iterable[Any], by_day: Collection[Any]) -> list[Any]:
    """Return parameters of which the interpreter, which is slow, takes the others at night."""
    late = [] if DEVICE == "cuda" else [pytest.mark.nightly]
    return [pytest.param(n, marks=[] if n in by_day else late) for n in numbers]


@contextlib.contextmanager
def switched(value: str) -> Iterator[dispatch.HostFamilies]:
    """Run the body as a new process does in which the switch has a value; yield its families."""
    answers = dispatch.allowed, dispatch._works_on_gpu, dispatch._interpreted, dispatch._has_triton
    families = dispatch.HostFamilies()
    with (
        mock.patch.dict(os.environ, {dispatch.SWITCH: value}),
        mock.patch.object(dispatch, "host", families),
    ):
        for answer in answers:
            answer.cache_clear()
        try:
            yield families
        finally:
            families.close()
            for answer in answers:
                answer.cache_clear()


def here(tensor: Tensor) -> Tensor:
    """Return a copy where kernels run."""
    return tensor.clone().to(DEVICE)


def bits(tensor: Tensor) -> Tensor:
    """Bit patterns, so that -0.0 is not 0.0; all NaN alike, for devices make different ones."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.cpu().nan_to_num(12345.678, float("inf"), -float("inf")).view(torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN for NaN."""
    nan = torch.equal(a.isnan().cpu(), b.isnan().cpu())
    return nan and a.dtype == b.dtype and torch.equal(bits(a).cpu(), bits(b).cpu())


def tensors(numel: int) -> dict[str, Tensor]:
    """What arithmetic may stumble over; on the CPU."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    alternating = torch.tensor([0.0, -0.0]).repeat(-(-numel // 2))[:numel]
    some = normal.clone()
    some[:: max(1, numel // 3)] = float("nan")
    some[1 :: max(1, numel // 2)] = -float("inf")
    return {
        "normal": normal,
        "zeros": alternating,
        "constant": torch.full((numel,), -1.5),
        "nan": torch.full((numel,), float("nan")),
        "inf": torch.full((numel,), float("inf")),
        "some of all": some,
        "tiny": normal * 1e-38,
        "huge": normal * 1e38,
        "sparse": normal.where(torch.arange(numel) % 97 == 5, 0.0),
    }


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, without what Triton's interpreter reads wrongly: bfloat16's subnormals."""
    cast = x.to(dtype)
    if INTERPRETED and dtype == torch.bfloat16:
        cast = cast.masked_fill((cast.abs() < torch.finfo(dtype).tiny) & (cast != 0), 0.0)
    return cast
