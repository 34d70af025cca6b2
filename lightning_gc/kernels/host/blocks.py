"""Kernels for the host that code blocks of a bucket by a few numbers each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.message import Packed, joined
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.blocks import RANGE, BlockCode
from lightning_gc.kernels.host.levels import pack_codes, unpack_codes
from lightning_gc.kernels.host.segments import jit, multiply_add, pointer
from lightning_gc.kernels.host.signs import in_pairs
from lightning_gc.kernels.shards import Layout, Parts, Payloads, ShardTable

TOGETHER = 8
"""Blocks that are packed together, so that they end with a byte."""
_BINS, _BETWEEN, _BOOK = range(3)
_KINDS = {"bins": _BINS, "range": _BETWEEN, "book": _BOOK}
_NOTHING = np.zeros(1, np.float32)


class Table(ShardTable):
    """Encodes and decodes parts of a bucket, or only decodes them if the code is of a book.

    Args:
        parts, shards: as for ``kernels.shards.Layout``.
        code: of all parts.
        device: of the bucket.
    """

    guards = cuts = False

    def __init__(
        self, parts: Parts, code: BlockCode, device: torch.device, shards: int = 1
    ) -> None:
        layout = Layout(parts, code.bits, code.block_size, shards)
        super().__init__(layout, *[layout.blocks] * code.numbers)
        self.encodes = code.book is None  # for which torch takes less time
        sizes = [min(code.block_size, row.numel) for row in layout.rows[0]]
        rows = zip(layout.rows[0], sizes, strict=True)
        self._rows = np.array([(r.start, r.stop, r.byte, r.block, size) for r, size in rows])
        self._kind = _KINDS[code.kind], code.bits
        self._values = _NOTHING if code.book is None else code.book.values.numpy()

    def _encode(
        self, packed: Sequence[Packed], buffer: Tensor, bucket: Bucket, mine: int | None
    ) -> None:
        ((codes, *numbers),) = packed
        means = joined(numbers).view(len(numbers), -1).numpy()
        _encode(buffer.numpy(), self._rows, codes.numpy(), means, *self._kind)
        packed[0].padding.zero_()

    def average(
        self, payloads: Payloads, out: Tensor, pending: Pending | None, mine: int | None = None
    ) -> bool:
        return self._add(payloads, out, 1 / len(payloads), fresh=True)

    def add(self, payload: Payload, out: Tensor, scale: float) -> bool:
        return self._add([payload], out, scale, fresh=False)

    def _add(self, payloads: Payloads, out: Tensor, scale: float, *, fresh: bool) -> bool:
        kept = [[tensor.contiguous() for tensor in payload] for payload in payloads]
        places = np.array([[tensor.data_ptr() for tensor in each] for each in kept], np.uint64)
        lengths = self.layout.codes, self.layout.blocks
        of = *self._kind, self._values, np.float32(scale), fresh
        _add(places, *lengths, out.numpy(), self._rows, *of)
        return True


@jit
def _encode(x, rows, packed, numbers, kind, bits):
    most = rows[:, 4].max()
    codes = np.empty(TOGETHER * (most + 1), np.uint8)
    unit, lanes = np.empty(most, np.float32), np.empty(most, np.float32)
    for part in range(rows.shape[0]):
        start, stop, byte, block, size = rows[part]
        for first in range(start, stop, TOGETHER * size):
            end = min(first + TOGETHER * size, stop)
            for at in range(first, end, size):
                own = x[at : min(at + size, end)]
                coded = codes[at - first : at - first + own.size]
                if kind == _BINS:
                    _code_bins(own, bits, coded, numbers[:, block], unit, lanes)
                else:
                    _code_range(own, coded, numbers[:, block])
                block += 1
            length = ((end - first) * bits + 7) // 8
            pack_codes(codes, end - first, bits, packed[byte : byte + length])
            byte += length


@jit
def _code_bins(x, bits, codes, means, unit, lanes):
    words, count = x.view(np.int32), 1 << bits
    zero, largest, members = np.float32(0), np.int32(0), 0
    for i in range(x.size):
        size = words[i] & np.int32(0x7FFFFFFF)
        sound = size <= np.int32(0x7F800000)
        largest = max(largest, size if sound else np.int32(0))
        members += sound
    scales = np.empty(2, np.int32)
    exponent = min(max(254 - int(largest >> 23), 1), 253)
    scales[0], scales[1] = exponent << 23, (254 - exponent) << 23
    down, up = scales.view(np.float32)
    for i in range(x.size):
        unit[i] = x[i] * down + zero if x[i] == x[i] else zero
        lanes[i] = unit[i] * unit[i]
    sigma = np.sqrt(in_pairs(lanes, x.size) / np.float32(max(members, 1)))
    sigma = sigma if sigma > 0 else np.float32(1)
    codes[:] = 0
    for i in range(1, count):
        _count_reaching(unit, sigma * np.float32((i - count // 2) * (RANGE / count)), codes)
    for i in range(count):
        inside = 0
        for j in range(x.size):
            hit = codes[j] == i and x[j] == x[j]
            lanes[j] = unit[j] if hit else zero
            inside += hit
        means[i] = in_pairs(lanes, x.size) / np.float32(max(inside, 1)) * up
    for i in range(x.size):
        x[i] -= means[codes[i]]


@jit
def _count_reaching(unit, edge, codes):
    for i in range(codes.size):
        codes[i] += unit[i] >= edge


@jit
def _code_range(x, codes, ends):
    zero = np.float32(0)
    low, high, bad = np.float32(np.inf), np.float32(-np.inf), False
    for i in range(x.size):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
        bad |= x[i] != x[i]
    low = np.float32(np.nan) if bad else low + zero
    high = np.float32(np.nan) if bad else high + zero
    ends[0], ends[1] = low, high
    half, most = np.float32(0.5), np.float32(255)
    extent = high * half - low * half
    divisor = extent if extent > 0 else np.float32(1)
    for i in range(x.size):
        share = (x[i] * half - low * half) / divisor * most
        share = most if share > most else (share if share > 0 else zero)
        codes[i] = np.uint8(np.int32(_whole(share)))
        x[i] -= _between(codes[i], low, high)


@jit
def _whole(x):
    """Return a number below 2^22 rounded to the nearest whole one, halves to even."""
    shift = np.float32(12582912)
    return (x + shift) - shift


@jit
def _between(code, low, high):
    share = np.float32(np.int32(code)) / np.float32(255)
    value = (np.float32(1) - share) * low + share * high
    value = low if value < low else value
    return high if value > high else value


@jit
def _add(places, length, blocks, out, rows, kind, bits, values, scale, fresh):
    codes = np.empty(TOGETHER * (rows[:, 4].max() + 1), np.uint8)
    for part in range(rows.shape[0]):
        start, stop, byte, block, size = rows[part]
        for first in range(start, stop, TOGETHER * size):
            end = min(first + TOGETHER * size, stop)
            taken = ((end - first) * bits + 7) // 8
            if fresh:
                out[first:end] = 0
            for worker in range(places.shape[0]):
                packed = carray(pointer(places[worker, 0]), length, np.uint8)
                unpack_codes(packed[byte : byte + taken], bits, codes)
                for at in range(first, end, size):
                    here, coded = out[at : min(at + size, end)], codes[at - first :]
                    number = block + (at - first) // size
                    _add_block(here, coded, places[worker], blocks, number, kind, values, scale)
            byte += taken
            block += TOGETHER


@jit
def _add_block(out, codes, places, blocks, block, kind, values, scale):
    one = carray(pointer(places[1]), blocks, np.float32)[block]
    if kind == _BINS:
        means = np.empty(places.size - 1, np.float32)
        for i in range(means.size):
            means[i] = carray(pointer(places[i + 1]), blocks, np.float32)[block]
        for i in range(out.size):
            out[i] = multiply_add(means[codes[i]], scale, out[i])
    elif kind == _BETWEEN:
        high = carray(pointer(places[2]), blocks, np.float32)[block]
        for i in range(out.size):
            out[i] = multiply_add(_between(codes[i], one, high), scale, out[i])
    else:
        for i in range(out.size):
            out[i] = multiply_add(values[codes[i]] * one, scale, out[i])


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results for blocks of 100 numbers beside torch's."""
    blocks = numbers.view(-1, 100)
    low, high = blocks.amin(dim=1) + 0.0, blocks.amax(dim=1) + 0.0
    left, out, parts = numbers.clone(), numbers.clone(), [("a", 0, 0, numbers.numel())]
    table = Table(parts, BlockCode("range", 8, 100, 2), numbers.device)
    (sent,) = table.encode(left, Bucket(numbers, {"a": numbers.shape}))
    yield sent[1], low
    yield sent[2], high
    share = sent[0].view(-1, 100).float() / 255
    lows, highs = low.view(-1, 1), high.view(-1, 1)
    values = ((1 - share) * lows + share * highs).clamp(lows, highs).view(-1)
    yield left, numbers - values
    table.add(sent, out, 1 / 3)
    yield out, numbers.add(values, alpha=1 / 3)


ATTEMPTS = {"blocks": _attempt}
