"""bfloat16: round a float32 tensor off, keeping the error, and add what was rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.kernels.dispatch import compiled


def round_off(buffer: Tensor) -> Tensor:
    """Return ``buffer`` rounded to bfloat16, and leave in it what rounding has left.

    Args:
        buffer: ``(numel,)``, changed in place.

    On the host, compiled, one pass that moves 10 bytes per element; torch's operations take two,
    the second of which converts as slowly as it is possible.

    Example:
        >>> error = torch.tensor([1.0, 1.001])
        >>> round_off(error), error
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([0.0000, 0.0010]))
    """
    if compiled(buffer):
        from lightning_gc.kernels.numba_kernels.bfloat16 import round_off as program

        return program(buffer)
    rounded = buffer.to(torch.bfloat16)
    buffer.sub_(rounded)
    return rounded


def add(out: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale · values`` to ``out``, both ``(numel,)``, the values in bfloat16.

    Example:
        >>> out = torch.ones(2)
        >>> add(out, torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 0.5)
        >>> out
        tensor([1.5000, 2.0000])
    """
    same = values.dtype == torch.bfloat16 and values.shape == out.shape
    if same and compiled(out) and values.is_contiguous():
        from lightning_gc.kernels.numba_kernels.bfloat16 import add as program

        program(out, values, scale)
    else:
        out.add_(values, alpha=scale)
