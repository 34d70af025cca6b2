"""Numba kernels over all parameters of a bucket, and what all kernels of the host share.

See ``kernels.segments``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from lightning_gc.core.segments import Pending, Segments

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


CHUNK = 1024
"""Elements whose intermediate numbers lie in the first cache."""
_BUSY = np.ones(1, np.float32)


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Return the pointer to an address, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


def addresses(tensors: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    """Return the addresses of contiguous tensors, ``(W,)`` uint64; they must be kept alive."""
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def peaks(flat: Tensor, segments: Segments) -> Tensor:
    """Return the largest magnitudes, ``(n,)`` float32; NaN if a parameter has one."""
    found = torch.empty(len(segments.spans), dtype=torch.float32, device="cpu")
    _peaks(flat.numpy().view(np.int32), segments.bounds, found.numpy().view(np.int32))
    return found


@jit
def _peaks(bits, bounds, found):
    for segment in range(len(bounds)):
        # Magnitudes are ordered like their bits, and NaN is above infinity.
        most = np.int32(0)
        for x in bits[bounds[segment, 0] : bounds[segment, 1]]:
            most = max(most, x & np.int32(0x7FFFFFFF))
        found[segment] = most


def weights(pending: Pending) -> tuple[np.float32, np.float32]:
    """Return ``decay`` and ``gain`` as kernels take them."""
    return np.float32(pending.decay), np.float32(pending.gain)


@jit
def compensate(error, grad, decay, gain):
    """Write ``decay·e + gain·g`` to ``error``, rounded as torch's ``mul_`` and ``add_`` do."""
    for i in range(error.size):
        error[i] = multiply_add(grad[i], gain, error[i] * decay)


@jit
def clean(error):
    """Set numbers that are not finite to zero."""
    bits = error.view(np.uint32)
    for i in range(error.size):
        finite = (bits[i] & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        error[i] = error[i] if finite else np.float32(0)


def poison(out: Tensor, pending: Pending) -> None:
    """Add the flags that have arrived to the first element of each parameter."""
    if not np.isfinite([flag.item() for flag in pending.flags]).all():
        out.index_fill_(0, pending.segments.starts, float("nan"))


def take(buffer: Tensor, table: Tensor, taken: Tensor, pending: Pending) -> None:
    """Move the parameters of ``table`` to ``taken``; see ``kernels.segments``."""
    grad = buffer if pending.grad is None else pending.grad
    arrays = buffer.numpy(), grad.numpy(), pending.peaks.numpy(), table.numpy(), taken.numpy()
    _take(*arrays, *weights(pending), pending.grad is not None)


@jit
def _take(buffer, grad, peaks, table, taken, decay, gain, add):
    for segment, start, stop, place in table:
        mine, sent = buffer[start:stop], taken[place : place + stop - start]
        if add:
            compensate(mine, grad[start:stop], decay, gain)
        if add and peaks[segment] == 0:
            sent[:] = 0
            clean(mine)
        else:
            copy(mine, sent)
            mine[:] = 0


def put(taken: Sequence[Tensor], out: Tensor, table: Tensor, pending: Pending) -> None:
    """Write the mean of ``taken`` to the parameters of ``table``; see ``kernels.segments``."""
    own = [tensor.contiguous() for tensor in taken]
    _put(addresses(own), own[0].numel(), np.float32(1 / len(own)), out.numpy(), table.numpy())
    poison(out, pending)


@jit
def _put(places, numel, share, out, table):
    for _, start, stop, place in table:
        part = out[start:stop]
        first = True
        for address in places:
            sent = numba.carray(pointer(address), numel, np.float32)[place : place + stop - start]
            if first:
                for i in range(part.size):
                    part[i] = sent[i] * share
            else:
                for i in range(part.size):
                    part[i] += sent[i] * share
            first = False


def book(buffer: Tensor, mean: Tensor, times: int, table: Tensor, pending: Pending | None) -> None:
    """Add ``times`` what is left of a mean; see ``kernels.segments``."""
    peaks = _BUSY if pending is None else pending.peaks.numpy()
    arrays = buffer.numpy(), mean.numpy(), peaks, table.numpy()
    _book(*arrays, np.float32(times), pending is not None)


@jit
def _book(buffer, mean, peaks, table, times, add):
    for segment, start, stop, place in table:
        mine, left = buffer[start:stop], mean[place : place + stop - start]
        clean(left)
        if add and peaks[segment] == 0:  # the error is added when the sum has been rounded
            for i in range(mine.size):
                left[i] *= times
            clean(left)
            for i in range(mine.size):
                mine[i] += left[i]
        else:
            for i in range(mine.size):
                mine[i] = multiply_add(left[i], times, mine[i])
        clean(mine)


def _peaks_attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    halves = Segments([(0, 96), (96, numbers.numel())], numbers.device)
    yield (
        peaks(numbers, halves),
        torch.stack([numbers[span].abs().max() for span in halves.spans]),
    )


ATTEMPTS = {"peaks": _peaks_attempt}
