"""Kernels for the host, compiled by numba: one pass over a tensor where torch needs several.

They give the bits of torch's operations, so workers with and without numba can train together. The
module is imported when first used, and compiled code is kept on disk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

jit = numba.njit(nogil=True, cache=True)
"""Compiles a kernel; other threads run meanwhile."""


def _operation(name: str, arguments: int) -> Callable[..., Any]:
    """Return LLVM's operation ``name`` for this number of float32 arguments."""
    number = ir.FloatType()
    kind = ir.FunctionType(number, [number] * arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic(name, [number], kind), values)

    if arguments == 1:
        return intrinsic(lambda typing, x: (types.float32(x), generate))
    return intrinsic(lambda typing, x, y: (types.float32(x, y), generate))


magnitude = _operation("llvm.fabs", 1)
floor = _operation("llvm.floor", 1)
copysign = _operation("llvm.copysign", 2)


@intrinsic
def multiply_add(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return ``x·y + z``, rounded once, as torch adds with a factor."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(x, y, z), generate


@jit
def times(value, constant):
    """Return the product of 32-bit words, which numba would compute in 64 bits."""
    return np.uint32(np.uint64(value) * np.uint64(constant) & np.uint64(0xFFFFFFFF))


@jit
def copy(source, into):
    """Copy ``source`` to the first elements of ``into``.

    Assigning an array to a slice would take 2 s longer to compile, for an error's text.
    """
    for i in range(source.size):
        into[i] = source[i]


def round_to_bfloat16(buffer: Tensor) -> Tensor:
    """Return ``buffer`` as bfloat16, ``(numel,)``, and leave the rounding error in ``buffer``."""
    rounded = torch.empty(buffer.shape, dtype=torch.bfloat16, device=buffer.device)
    numbers = buffer.numpy()
    _round_to_bfloat16(
        numbers, numbers.view(np.uint32), rounded.view(torch.int16).numpy().view(np.uint16)
    )
    return rounded


def add_bfloat16(out: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale`` times bfloat16 ``values`` to ``out``, both ``(numel,)``."""
    _add_bfloat16(out.numpy(), values.view(torch.int16).numpy().view(np.uint16), np.float32(scale))


@jit
def _round_to_bfloat16(x, bits, rounded):
    wide = np.empty(1024, np.uint32)
    for start in range(0, x.size, wide.size):
        stop = min(start + wide.size, x.size)
        part = slice(start, stop)
        upper_half(bits[part], rounded[part])
        widen(rounded[part], wide)
        subtract(x[part], wide.view(np.float32))


@jit
def upper_half(bits, rounded):
    """Round to the nearest, and halves to even; NaN stays NaN."""
    for i in range(bits.size):
        x = bits[i]
        nearest = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded[i] = np.uint16(np.uint32(0x7FC0) if is_nan else nearest)


@jit
def widen(rounded, wide):
    """Write bfloat16 numbers, given as uint16, to ``wide`` as bits of float32."""
    for i in range(rounded.size):
        wide[i] = np.uint32(rounded[i]) << np.uint32(16)


@jit
def subtract(x, rounded):
    """Subtract ``rounded`` from ``x``."""
    for i in range(x.size):
        x[i] -= rounded[i]


@jit
def _add_bfloat16(out, values, scale):
    wide = np.empty(1024, np.uint32)
    for start in range(0, out.size, wide.size):
        part = slice(start, min(start + wide.size, out.size))
        widen(values[part], wide)
        _add_wide(out[part], wide.view(np.float32), scale)


@jit
def _add_wide(out, values, scale):
    for i in range(out.size):
        out[i] = multiply_add(values[i], scale, out[i])


def _bfloat16_attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    left, rounded = numbers.clone(), numbers.to(torch.bfloat16)
    values = round_to_bfloat16(left)
    yield values, rounded
    yield left, numbers - rounded
    out = numbers.clone()
    add_bfloat16(out, values, 1 / 3)
    yield out, numbers.add(rounded, alpha=1 / 3)


ATTEMPTS = {"bfloat16": _bfloat16_attempt}
