"""Declare and launch Triton kernels.

They use only features of Triton 3.2 (torch 2.6). To equal the torch reference bit for bit, all are
launched with ``prepared_launch.EXACT``, divide with ``div_rn`` (``/`` is approximate), and take no
minimum or maximum of NaN, on which devices differ. Atomics are of integers only: their sums and
maxima do not depend on the order.

Triton compiles a variant of a kernel for each kind of argument: numbers that are 1 or multiples of
16, tensors that begin at multiples of 16 bytes. Parameters lie anywhere in buckets and payloads
anywhere in messages, so that would be dozens, compiled in the midst of training. With ``kernel``
there is one variant for each set of constants and element types, and a few more where a kernel is
faster for what is ``aligned``.

Arguments are not bundled in tuples. Triton 3.2 takes no tuples. Later versions make variants for
the numbers in a tuple, also where ``kernel`` declares that they must not. So a kernel lists them
in groups, a line each, which are the same in all kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from lightning_gc.kernels import recording
from lightning_gc.kernels.gpu import prepared_launch


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
    tape = recording.running()
    if tape is None:
        prepared_launch.start(program, grid, arguments, constants, may_prepare=True)
        return
    places, plain = tape.without_steps(arguments)
    with tape.aside():
        started = prepared_launch.start(program, grid, plain, constants, may_prepare=False)
    seen = [recording.STEP if i in places else each for i, each in enumerate(arguments)]
    what = program.__name__, tuple(grid), tuple(constants.items())
    if started is None:
        again = program, grid, plain, constants
        writes = [(plain.__setitem__, (at,)) for at in places]
        tape.add(_by_triton, again, writes, what, seen)
    else:
        variant, stream = started
        given, writes = variant.copied(grid, stream, places)
        tape.add(prepared_launch.driver_call(), given, writes, what, seen)


def _by_triton(*again: Any) -> None:
    prepared_launch.by_triton(*again)


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
