"""bfloat16 on the host: rounding with its error, and adding with a factor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gc.kernels.numba_kernels.float32 import jit, multiply_add


def round_off(buffer: Tensor) -> Tensor:
    """Return ``buffer`` as bfloat16, ``(numel,)``, and leave in it what rounding has left."""
    rounded = torch.empty(buffer.shape, dtype=torch.bfloat16, device=buffer.device)
    numbers = buffer.numpy()
    _round_off(numbers, numbers.view(np.uint32), rounded.view(torch.int16).numpy().view(np.uint16))
    return rounded


def add(out: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale`` times bfloat16 ``values`` to ``out``, both ``(numel,)``."""
    _add(out.numpy(), values.view(torch.int16).numpy().view(np.uint16), np.float32(scale))


@jit
def _round_off(x, bits, rounded):
    wide = np.empty(1024, np.uint32)
    for start in range(0, x.size, wide.size):
        stop = min(start + wide.size, x.size)
        part = slice(start, stop)
        _upper_half(bits[part], rounded[part])
        _widen(rounded[part], wide)
        _subtract(x[part], wide.view(np.float32))


@jit
def _upper_half(bits, rounded):
    """Round to the nearest, and halves to even; NaN stays NaN."""
    for i in range(bits.size):
        x = bits[i]
        nearest = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded[i] = np.uint16(np.uint32(0x7FC0) if is_nan else nearest)


@jit
def _widen(rounded, wide):
    for i in range(rounded.size):
        wide[i] = np.uint32(rounded[i]) << np.uint32(16)


@jit
def _subtract(x, rounded):
    for i in range(x.size):
        x[i] -= rounded[i]


@jit
def _add(out, values, scale):
    wide = np.empty(1024, np.uint32)
    for start in range(0, out.size, wide.size):
        part = slice(start, min(start + wide.size, out.size))
        _widen(values[part], wide)
        _add_wide(out[part], wide.view(np.float32), scale)


@jit
def _add_wide(out, values, scale):
    for i in range(out.size):
        out[i] = multiply_add(values[i], scale, out[i])
