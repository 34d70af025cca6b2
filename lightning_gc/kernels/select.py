"""Add the gradient to the error and move what reaches a threshold out of it, in ascending order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gc.kernels.dispatch import flat, fused


class Selection(NamedTuple):
    """What ``select`` has moved out of the error, on the error's device.

    Attributes:
        values: ``(capacity,)`` float32; zero where there was nothing more to take.
        positions: ``(capacity,)`` int64, ascending; ``numel`` where there was nothing more.
        reached: 0-dim int64, how many elements reach the threshold. Of more than ``capacity`` those
            of the lowest positions are taken.
    """

    values: Tensor
    positions: Tensor
    reached: Tensor


def select(
    gradient: Tensor | None, error: Tensor, threshold: float | Tensor, capacity: int | None = None
) -> Selection:
    """Compensate, select and compact: ``x = e + g``; ``|x_i| ≥ λ`` is taken, up to ``capacity``.

    What is taken becomes 0 in ``error``; the rest stays there, so nothing is lost. NaN is taken,
    whatever the threshold: it must be sent, or it would stay in the error unseen.

    Args:
        gradient: g, ``(numel,)``, float32, bfloat16 or float16, in the units of the error; None
            where it has been added before.
        error: e, ``(numel,)`` float32, changed in place.
        threshold: λ, a magnitude; a tensor of one element on the error's device is not read by the
            host.
        capacity: most elements to take; None: all of them, at the price that the host must wait
            to know how many. With a number it never waits on CUDA.

    Two kernels on CUDA: the first adds, counts by blocks and marks what reaches λ in a bitmap; the
    second looks at the bitmap and gathers. They move ``12 + 1/4`` bytes an element with a float32
    gradient, ``4 + 1/4`` without one, and some 50 bytes a taken element. Blocks are joined in
    order by a running sum, without atomics, so results do not vary.

    Status:
        Equal to the reference bit for bit in Triton's interpreter, and compiled for NVIDIA GPUs;
        not yet run on one. ``HardThreshold`` uses it without the gradient, since between a memory
        and a compressor the engine sets errors of unused parameters aside.

    Raises:
        ValueError: gradient and error of different shapes, a negative capacity.

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
    """Return the ascending positions that ``select`` would take of all, ``(k,)`` int64.

    ``buffer``, ``(numel,)``, stays as it is. The host waits for k. The two kernels move ``4 + 1/4``
    bytes an element; torch's operations make an absolute value, two masks and a count of their own.
    """
    if fused(buffer):
        from lightning_gc.kernels.triton_kernels.select import reaching as program

        return program(buffer, threshold)
    return reaching_reference(buffer, threshold)


def reaching_reference(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Do the same with torch's operations."""
    return (buffer.abs() < threshold).logical_not_().nonzero().view(-1)


def reference(
    gradient: Tensor | None, error: Tensor, threshold: float | Tensor, capacity: int | None
) -> Selection:
    """Do the same with torch's operations. The host waits."""
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
