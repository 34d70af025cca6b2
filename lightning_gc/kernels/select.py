"""select: add the gradient to the error and move elements at or above a threshold out of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gc.kernels.dispatch import flat, fused


class Selection(NamedTuple):
    """Elements that ``select`` has moved out of the error, on the error's device.

    Attributes:
        values: ``(capacity,)`` float32, padded with 0.
        positions: ``(capacity,)`` int64, ascending, padded with ``numel``.
        reached: 0-dim int64, number of elements that reach the threshold. If more than
            ``capacity``, those at the lowest positions are moved.
    """

    values: Tensor
    positions: Tensor
    reached: Tensor


def select(
    gradient: Tensor | None, error: Tensor, threshold: float | Tensor, capacity: int | None = None
) -> Selection:
    """Compensate, select and compact: ``x = e + g``; move ``|x_i| ≥ λ`` out, up to ``capacity``.

    Moved elements become 0 in ``error``; the rest stays there, so nothing is lost. NaN is moved
    whatever the threshold: it must be sent, or it would stay in the error unseen.

    Args:
        gradient: g, ``(numel,)``, float32, bfloat16 or float16, in the units of the error; None
            if already added.
        error: e, ``(numel,)`` float32, changed in place.
        threshold: λ, a magnitude; a tensor of one element on the error's device is not read by the
            host.
        capacity: most elements to move. None moves all; then the host waits for their number on
            CUDA, else it never does.

    Two kernels on CUDA: the first adds, marks elements that reach λ in a bitmap and counts them by
    block; the second gathers. They move ``12 + 1/4`` bytes per element with a float32 gradient,
    ``4 + 1/4`` without, and some 50 bytes per selected element. A running sum over blocks, no
    atomics, so results are deterministic.

    Status:
        Equal to the reference bit for bit in Triton's interpreter, and compiled for NVIDIA GPUs;
        not yet run on one. ``HardThreshold`` uses it without the gradient, since between memory and
        compressor the guard sets aside the errors of unused parameters.

    Raises:
        ValueError: gradient and error differ in shape, or a negative capacity.

    Example:
        >>> error = torch.tensor([0.5, 0.0, -2.0])
        >>> select(torch.tensor([0.5, 0.25, 0.0]), error, 1.0, 2)[:2]
        (tensor([ 1., -2.]), tensor([0, 2]))
        >>> error
        tensor([0.0000, 0.2500, 0.0000])
    """
    numel = error.numel()
    if error.dim() != 1 or (gradient is not None and gradient.shape != error.shape):
        raise ValueError(
            f"select: the error has shape {tuple(error.shape)} and the gradient "
            f"{None if gradient is None else tuple(gradient.shape)}; give two flat tensors of the "
            f"same length."
        )
    if capacity is not None and capacity < 0:
        raise ValueError(f"select(capacity={capacity}): give a number of elements, 0 or more.")
    if fused(error) and (gradient is None or flat(gradient, numel)):
        from lightning_gc.kernels.triton_kernels.select import select as program

        return Selection(*program(gradient, error, threshold, capacity))
    return reference(gradient, error, threshold, capacity)


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the ascending positions with ``|x_i| ≥ λ`` or NaN, ``(k,)`` int64.

    ``buffer``, ``(numel,)``, is not changed. The host waits for k. The two kernels move ``4 + 1/4``
    bytes per element; torch operations allocate an absolute value, two masks and a count.
    """
    if fused(buffer):
        from lightning_gc.kernels.triton_kernels.select import reaching as program

        return program(buffer, threshold)
    return reaching_reference(buffer, threshold)


def reaching_reference(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Compute the same with torch operations."""
    return (buffer.abs() < threshold).logical_not_().nonzero().view(-1)


def reference(
    gradient: Tensor | None, error: Tensor, threshold: float | Tensor, capacity: int | None
) -> Selection:
    """Compute the same with torch operations. The host waits."""
    if gradient is not None:
        error.add_(gradient)
    found = reaching_reference(error, threshold)
    reached = torch.full((), found.numel(), device=error.device)
    room = found.numel() if capacity is None else capacity
    found = found[:room]
    values = error.new_zeros(room)
    values[: len(found)] = error[found]
    positions = found.new_full((room,), error.numel())
    positions[: len(found)] = found
    error[found] = 0
    return Selection(values, positions, reached)
