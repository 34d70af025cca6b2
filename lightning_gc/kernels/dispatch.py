"""The one place that says whether a fused kernel runs, or torch."""

from __future__ import annotations

import functools
import os
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_NUMEL = 1 << 30  # kernels count in int32


def fused(tensor: Tensor) -> bool:
    """Return whether the Triton kernels can work on ``tensor``, ``(numel,)``.

    So they do on CUDA where triton can be imported (torch's CUDA wheels for Linux bring it) and a
    first small kernel gives the right result; otherwise torch runs, after a warning where a kernel
    failed. On CPU they do only in Triton's interpreter, for tests: ``TRITON_INTERPRET=1`` in the
    environment before triton is imported. Other dtypes than float32 are torch's in any case.
    """
    if tensor.dtype != torch.float32 or not 0 < tensor.numel() < MAX_NUMEL:
        return False
    if not tensor.is_contiguous():
        return False
    if tensor.device.type == "cuda":
        return _works(tensor.device)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return interpreted and tensor.device.type == "cpu" and _found()


def flat(tensor: Tensor, numel: int | None = None) -> bool:
    """Return whether a kernel may walk ``tensor`` as ``numel`` numbers, one after the other."""
    return tensor.is_contiguous() and (numel is None or tensor.shape == (numel,))


@functools.cache
def _found() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _works(device: torch.device) -> bool:
    """Try a kernel, once per device: it may lack a C compiler, or be too old."""
    if not _found():
        return False
    try:
        from lightning_gc.kernels.triton_kernels.accumulate import accumulate

        out = torch.ones(3, device=device)
        accumulate(out, torch.tensor([0, 2], device=device), torch.ones(2, device=device), 0.5)
        if out.tolist() != [1.5, 1.0, 1.5]:
            raise ArithmeticError(f"a first kernel returned {out.tolist()}")
    except Exception as error:  # whatever a compiler or a driver may raise
        warnings.warn(
            f"Triton's kernels do not run on {device} ({type(error).__name__}: {error}); torch's "
            f"operations are used instead, with the same results.",
            stacklevel=2,
        )
        return False
    return True
