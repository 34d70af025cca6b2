"""Numba kernels that round a whole bucket to bfloat16, and average what has arrived."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.message import Packed, reserve_all
from lightning_gc.core.segments import Pending, Segments, Workspace
from lightning_gc.kernels.host.segments import (
    CHUNK,
    addresses,
    book,
    clean,
    compensate,
    pointer,
    poison,
    weights,
)
from lightning_gc.kernels.host.tensors import (
    jit,
    multiply_add,
    round_to_bfloat16,
    subtract,
    upper_half,
    widen,
)


def encode(buffer: Tensor, dtype: torch.dtype, pending: Pending) -> Packed:
    """Return the payload (values,) of ``Cast``, as ``core.segments.Pending`` says."""
    packed = pending.reserve([(dtype, buffer.numel())])
    _round(buffer, pending, packed[0], _rows(pending.segments))
    pending.end(packed)
    return packed.first(1)


@functools.lru_cache(maxsize=256)
def _rows(segments: Segments) -> np.ndarray[Any, Any]:
    bounds = segments.bounds
    return np.column_stack((bounds, bounds[:, 0], np.arange(len(bounds))))


def _round(
    buffer: Tensor,
    pending: Pending,
    sent: Tensor,
    rows: np.ndarray[Any, Any],
    *,
    whole: bool = True,
) -> None:
    """Move numbers to ``sent``; unless ``whole``, errors that are not finite stay.

    Rows have first element and end in the bucket, first element in ``sent``, and the parameter.
    """
    grad = buffer if pending.grad is None else pending.grad
    halves = sent.view(torch.int16).numpy().view(np.uint16)
    arrays = buffer.numpy(), grad.numpy(), halves, rows, (pending.peaks == 0).numpy()
    _round_bucket(*arrays, *weights(pending), pending.grad is not None, whole)


class Shards:
    """W shards of a bucket; see ``compressors.base.ShardKernels``.

    The engine's work is done too, so a bucket must have some ``pending``.

    Args:
        segments: the bucket's parameters.
        numel: elements of the bucket.
        workers: W.
    """

    def __init__(self, segments: Segments, numel: int, workers: int) -> None:
        self.size = -(-numel // workers)
        ends = [min(i * self.size, numel) for i in range(workers + 1)]
        self.spans = list(itertools.pairwise(ends))
        self._rows = [
            np.array(
                [
                    (max(start, low), min(stop, high), max(start, low) - low, index)
                    for index, (start, stop) in enumerate(segments.bounds.tolist())
                    if max(start, low) < min(stop, high)
                ],
                np.int64,
            ).reshape(-1, 4)
            for low, high in self.spans
        ]

    def encode(self, buffer: Tensor, bucket: Bucket) -> list[Packed]:
        """Return each shard's payload (values,), as ``core.segments.Pending`` says."""
        assert bucket.pending is not None
        packed = reserve_all([(torch.bfloat16, self.size)], buffer.device, len(self.spans))
        for shard, (payload, rows) in enumerate(zip(packed, self._rows, strict=True)):
            low, high = self.spans[shard]
            payload[0][high - low :].zero_()
            payload.padding.zero_()
            # Numbers of the own shard that are not finite stay for ``book``.
            _round(buffer, bucket.pending, payload[0], rows, whole=shard != bucket.worker)
        return packed

    def again(self, payloads: Sequence[Payload], buffer: Tensor, bucket: Bucket) -> Packed:
        """Return the payload of the mean of this worker's shard, and book what it loses."""
        pending, rows = bucket.pending, self._rows[bucket.worker]
        assert pending is not None
        mean = buffer.new_empty(self.size)
        _average_of([values for (values,) in payloads], mean)
        packed = pending.reserve([(torch.bfloat16, self.size)])
        packed[0].copy_(round_to_bfloat16(mean))
        pending.end(packed)
        if pending.grad is not None:
            table = np.ascontiguousarray(rows[:, [3, 0, 1, 2]].T)
            book(buffer, mean, len(self.spans), torch.from_numpy(table), pending)
        return packed.first(1)

    def average(self, payloads: Sequence[Payload], out: Tensor, pending: Pending | None) -> None:
        """Write all shards to ``out``."""
        for (values,), (low, high) in zip(payloads, self.spans, strict=True):
            if low < high:
                _average_of([values], out[low:high])
        if pending is not None:
            poison(out, pending)


shards = functools.lru_cache(maxsize=256)(Shards)
"""``Shards``, made once for each bucket."""


@jit
def _round_bucket(x, grad, halves, rows, idle, decay, gain, add, whole):
    wide = np.empty(CHUNK, np.uint32)
    for row in range(len(rows)):
        begin, end, place, segment = rows[row]
        for start in range(begin, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            mine, sent = x[part], halves[part.start - begin + place : part.stop - begin + place]
            if add:
                compensate(mine, grad[part], decay, gain)
            if add and idle[segment]:
                sent[:] = 0
            else:
                upper_half(mine.view(np.uint32), sent)
            if add:
                widen(sent, wide)
                subtract(mine, wide.view(np.float32))
                if whole or idle[segment]:
                    clean(mine)


def average(payloads: Sequence[Tensor], out: Tensor, pending: Pending) -> None:
    """Write the mean of all workers' values to ``out``."""
    _average_of(payloads, out)
    poison(out, pending)


def _average_of(payloads: Sequence[Tensor], out: Tensor) -> None:
    sent = [values.contiguous() for values in payloads]
    _average(addresses(sent), np.float32(1 / len(sent)), out.numpy())


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
