"""Numba kernels that round a whole bucket to bfloat16, and average what has arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.message import Packed
from lightning_gc.core.segments import Pending, Segments, Workspace
from lightning_gc.kernels.host.segments import (
    CHUNK,
    addresses,
    clean,
    compensate,
    pointer,
    poison,
    weights,
)
from lightning_gc.kernels.host.tensors import (
    jit,
    multiply_add,
    subtract,
    upper_half,
    widen,
)


def encode(buffer: Tensor, dtype: torch.dtype, pending: Pending) -> Packed:
    """Return the payload (values,) of ``Cast``, as ``core.segments.Pending`` says."""
    packed = pending.reserve([(dtype, buffer.numel())])
    halves = packed[0].view(torch.int16).numpy().view(np.uint16)
    add = pending.grad is not None
    grad = buffer if pending.grad is None else pending.grad
    idle = (pending.peaks == 0).numpy()
    arrays = buffer.numpy(), grad.numpy(), halves, pending.segments.bounds, idle
    _round_bucket(*arrays, *weights(pending), add)
    pending.end(packed)
    return packed.first(1)


@jit
def _round_bucket(x, grad, halves, bounds, idle, decay, gain, add):
    wide = np.empty(CHUNK, np.uint32)
    for segment in range(len(bounds)):
        for start in range(bounds[segment, 0], bounds[segment, 1], CHUNK):
            part = slice(start, min(start + CHUNK, bounds[segment, 1]))
            mine, sent = x[part], halves[part]
            if add:
                compensate(mine, grad[part], decay, gain)
            if add and idle[segment]:
                sent[:] = 0
            else:
                upper_half(mine.view(np.uint32), sent)
            if add:
                widen(sent, wide)
                subtract(mine, wide.view(np.float32))
                clean(mine)


def average(payloads: Sequence[Tensor], out: Tensor, pending: Pending) -> None:
    """Write the mean of all workers' values to ``out``."""
    sent = [values.contiguous() for values in payloads]
    _average(addresses(sent), np.float32(1 / len(sent)), out.numpy())
    poison(out, pending)


@jit
def _average(places, share, out):
    wide = np.empty(CHUNK, np.uint32)
    for start in range(0, out.size, CHUNK):
        part = out[start : min(start + CHUNK, out.size)]
        part[:] = 0
        for place in places:
            halves = numba.carray(pointer(place), out.size, np.uint16)
            widen(halves[start : start + part.size], wide)
            values = wide.view(np.float32)
            for i in range(part.size):
                part[i] = multiply_add(values[i], share, part[i])


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    segments = Segments([(0, numbers.numel())], numbers.device)
    known = numbers.abs().max().view(1), numbers.new_zeros(1), Workspace(segments)
    left, mean = numbers.clone(), numbers.clone()
    pending = Pending(segments, *known, grad=mean)
    sent = 2 * numbers
    rounded = sent.to(torch.bfloat16)
    (values,) = encode(left, torch.bfloat16, pending)
    yield values, rounded
    yield left, sent - rounded
    average([values, values], mean, pending)
    yield mean, rounded.float()


ATTEMPTS = {"casts": _attempt}
