"""Declare and launch Triton kernels.

They use only features of Triton 3.2 (torch 2.6). To equal the torch reference bit for bit, all are
launched with ``EXACT``, divide with ``div_rn`` (``/`` is approximate), and take no minimum or
maximum of NaN, on which devices differ. Atomics are of integers only: their sums and maxima do not
depend on the order.

Triton compiles a variant of a kernel for each kind of argument: numbers that are 1 or multiples of
16, tensors that begin at multiples of 16 bytes. Parameters lie anywhere in buckets and payloads
anywhere in messages, so that would be dozens, compiled in the midst of training. With ``kernel``
there is one variant for each set of constants and element types, and a few more where a kernel is
faster for what is ``aligned``.

Arguments are not bundled in tuples. Triton 3.2 takes no tuples. Later versions make variants for
the numbers in a tuple, also where ``kernel`` declares that they must not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum round twice, as two torch operations do."""


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that declares a kernel.

    Args:
        aligned: arguments whose alignment makes a kernel faster: the tensor that is loaded in
            vectors, and its number of elements.
    """

    def declare(function: Callable[..., None]) -> Any:
        arguments = inspect.signature(function).parameters.values()
        numbers = {argument.name for argument in arguments if argument.annotation is argument.empty}
        others = sorted(numbers - set(aligned))
        return triton.jit(do_not_specialize=others, do_not_specialize_on_alignment=others)(function)

    return declare


def launch(program: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Start ``program`` on the device of the first tensor among ``arguments``.

    Args:
        program: as declared by ``kernel``.
        grid: numbers of programs, one to three.
        arguments: tensors and numbers, in the kernel's order.
        constants: its constants by name.
    """
    here = next(argument for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device_of(here):
        program[tuple(grid)](*arguments, **constants, **EXACT)


@triton.jit
def magnitude_bits(x):
    """Return the bits of magnitudes, int32: ordered like them, infinity before NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_finite(x):
    """Return whether numbers are finite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def mixed(x):
    """Return a permutation of 32-bit numbers in which each bit depends on all."""
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def word(low, high, index):
    """Return 32 random bits, uint32, as ``kernels.permutation`` has them.

    ``low`` and ``high`` are halves of a key, uint32; ``high`` includes the step.
    """
    return mixed(mixed(low ^ (((index + 1) * 0x9E3779B9) & 0xFFFFFFFF)) ^ high)


@triton.jit
def end_message(flag, sent_flag, padding, length):
    """Write the guard's flag and zeros behind the last tensor of a message; one program does."""
    tl.store(sent_flag, tl.load(flag))
    at = tl.arange(0, 16)  # core.message.ALIGNMENT
    tl.store(padding + at, tl.zeros([16], tl.uint8), mask=at < length)
