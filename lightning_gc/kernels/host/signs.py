"""Kernels for the host that send a bit per element of a bucket and the means of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed, reserve_all
from lightning_gc.core.segments import PIECE, Pending
from lightning_gc.kernels.host.segments import book
from lightning_gc.kernels.host.tensors import jit, magnitude, multiply_add
from lightning_gc.kernels.signs import LANES, SUMS, Layout

_BLOCK = 2048  # elements whose signs lie in the first cache
_SPREAD = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint8).view(np.uint64)[:, 0]
"""The eight bits of each byte, a byte each."""


def mean(numbers: Tensor, share: float) -> Tensor:
    """Return the sum of ``numbers / PIECE`` times ``share``; see ``kernels.signs.mean``."""
    sums = np.empty(-(-numbers.numel() // PIECE), np.float32)
    return torch.tensor(
        _mean(numbers.numpy(), _AS_IS, np.float32(share), sums), dtype=torch.float32, device="cpu"
    )


class Table:
    """Encodes and decodes the parts of a layout; see ``kernels.signs.Layout``.

    Args:
        layout: of the payloads.
        device: of the bucket.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._rows = [np.array(rows, np.int64) for rows in layout.rows]
        longest = max(row.numel for rows in layout.rows for row in rows)
        self._sums = np.empty(-(-longest // PIECE), np.float32)

    def encode(self, buffer: Tensor, bucket: Bucket) -> list[Packed]:
        """Move signs and means out of ``buffer``: a payload (signs, means) for each shard."""
        packed = reserve_all(self.layout.fields, buffer.device, self.layout.shards)
        for rows, payload in zip(self._rows, packed, strict=True):
            self._take(buffer, rows[:, 1:5], payload)
        return packed

    def average(
        self, payloads: Sequence[Sequence[Tensor]], out: Tensor, pending: Pending | None
    ) -> None:
        """Write the mean of all workers' payloads, or all shards' payloads, to ``out``."""
        if self.layout.shards == 1:
            self._average(payloads, out, self._rows[0][:, [1, 2, 4]])
            return
        for rows, payload in zip(self._rows, payloads, strict=True):
            self._average([payload], out, rows[:, [1, 2, 4]])

    def again(self, payloads: Sequence[Sequence[Tensor]], buffer: Tensor, bucket: Bucket) -> Packed:
        """Return the payload of the mean of this worker's shard, and book what it loses.

        Args:
            payloads: of this shard, from all workers.
            buffer: of the whole bucket; W times the loss is added to the shard.
            bucket: in its second phase.
        """
        rows, (packed,) = (
            self._rows[bucket.worker],
            reserve_all(self.layout.fields, buffer.device, 1),
        )
        begins, sizes, bytes_of = rows[:, 7], rows[:, 3], rows[:, 4]
        mean = buffer.new_empty(self.layout.numel)
        self._average(payloads, mean, np.column_stack([begins, begins + sizes, bytes_of]))
        row = np.column_stack([begins, begins + sizes, sizes, bytes_of])
        self._take(mean, row, packed)
        book(buffer, mean, self.layout.shards, rows[:, [1, 2, 7]])
        return packed

    def _take(self, flat: Tensor, places: np.ndarray[Any, Any], packed: Packed) -> None:
        signs, means = packed
        arrays = flat.numpy(), places, signs.numpy(), means.numpy()
        _encode(*arrays, self._sums, self.layout.split)
        packed.padding.zero_()

    def _average(
        self, payloads: Sequence[Sequence[Tensor]], out: Tensor, places: np.ndarray[Any, Any]
    ) -> None:
        share = np.float32(1 / len(payloads))
        for sender, (signs, means) in enumerate(payloads):
            arrays = out.numpy(), places, signs.numpy(), means.numpy()
            _add(*arrays, share, self.layout.split, sender == 0, _SPREAD)


_AS_IS, _MAGNITUDES, _BELOW, _ABOVE = range(4)


@jit
def _mean(x, kind, share, sums):
    """Return the sum of a kind of ``x / PIECE`` times ``share``, in the order of all kernels."""
    lanes = np.zeros(LANES, np.float32)
    pieces = (x.size + PIECE - 1) // PIECE
    for piece in range(pieces):
        start, stop = piece * PIECE, min((piece + 1) * PIECE, x.size)
        width = min(stop - start, LANES)
        lanes[:width] = 0
        for row in range(start, stop, LANES):
            _add_row(x[row : min(row + LANES, stop)], kind, lanes)
        sums[piece] = _in_pairs(lanes, width) * share
    width = min(pieces, SUMS)
    lanes[:width] = 0
    for row in range(0, pieces, SUMS):
        for i in range(min(SUMS, pieces - row)):
            lanes[i] += sums[row + i]
    return _in_pairs(lanes, width)


@jit
def _add_row(x, kind, lanes):
    scale = np.float32(1 / PIECE)
    if kind == _AS_IS:
        for i in range(x.size):
            lanes[i] += x[i] * scale
    elif kind == _MAGNITUDES:
        for i in range(x.size):
            lanes[i] += magnitude(x[i] * scale)
    elif kind == _BELOW:
        for i in range(x.size):
            lanes[i] += np.float32(0) if x[i] > 0 else x[i] * scale
    else:
        for i in range(x.size):
            lanes[i] += np.float32(0) if x[i] < 0 else x[i] * scale


@jit
def _in_pairs(lanes, width):
    while width > 1:
        half = width // 2
        for i in range(half):
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1]
        if width % 2:
            lanes[half] = lanes[width - 1] + np.float32(0)
        width -= half
    return lanes[0]


@jit
def _encode(x, places, signs, means, sums, split):
    """Encode the parts at ``places``: first element, end, elements with padding, first byte."""
    flags = np.empty(_BLOCK, np.uint8)
    one, scale = np.float32(1), np.float32(PIECE)
    for part in range(places.shape[0]):
        start, stop, numel, byte = places[part]
        own = x[start:stop]
        if split:
            negative = 0
            for i in range(own.size):
                negative += 1 if own[i] < 0 else 0
            below = _mean(own, _BELOW, scale * (one / np.float32(max(negative, 1))), sums)
            others = max(numel - negative, 1)
            above = _mean(own, _ABOVE, scale * (one / np.float32(others)), sums)
            means[2 * part], means[2 * part + 1] = below, above
        else:
            above = _mean(own, _MAGNITUDES, scale * (one / np.float32(numel)), sums)
            below = -above
            means[part] = above
        for at in range(0, numel, _BLOCK):
            end = min(at + _BLOCK, numel)
            there = max(min(end, own.size) - at, 0)
            _take(own[at : at + there], below, above, flags)
            flags[there : end - at] = 1  # zeros are not negative
            flags[end - at : (end - at + 7) // 8 * 8] = 0
            _gather(flags.view(np.uint64), signs[byte + at // 8 : byte + (end + 7) // 8])


@jit
def _take(x, below, above, flags):
    for i in range(x.size):
        positive = x[i] >= 0  # not NaN
        x[i] -= above if positive else below
        flags[i] = positive


@jit
def _gather(words, signs):
    for i in range(signs.size):
        signs[i] = (words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56)


@jit
def _add(out, places, signs, means, share, split, first, spread):
    flags = np.empty(_BLOCK, np.uint8)
    words = flags.view(np.uint64)
    for part in range(places.shape[0]):
        start, stop, byte = places[part]
        above = means[2 * part + 1] if split else means[part]
        below = means[2 * part] if split else -above
        # Rounded once, as a product that is added to 0.
        low, high = below * share + np.float32(0), above * share + np.float32(0)
        for at in range(start, stop, _BLOCK):
            end = min(at + _BLOCK, stop)
            own = signs[byte + (at - start) // 8 : byte + (end - start + 7) // 8]
            for i in range(own.size):
                words[i] = spread[own[i]]
            if first:
                _set(out[at:end], flags, low, high)
            else:
                _add_levels(out[at:end], flags, below, above, share)


@jit
def _set(out, flags, low, high):
    for i in range(out.size):
        out[i] = high if flags[i] else low


@jit
def _add_levels(out, flags, below, above, share):
    for i in range(out.size):
        out[i] = multiply_add(above if flags[i] else below, share, out[i])


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of all kernels for ``numbers`` beside torch's."""
    from lightning_gc.kernels import signs as reference

    size = numbers.numel()
    share = reference.share_of(size)
    negative = numbers < 0
    magnitude = reference.by_torch(numbers.abs(), share)
    yield mean(numbers.abs(), share), magnitude
    fewer = negative.sum()
    halves = (numbers.clamp(max=0), fewer), (numbers.clamp(min=0), size - fewer)
    split = [reference.by_torch(x, reference.share_of(int(count))) for x, count in halves]
    bucket = Bucket(numbers, {"a": (size,)})
    for levels, two in (([-magnitude, magnitude], False), (split, True)):
        left, out = numbers.clone(), numbers.clone()
        table = Table(Layout([(0, 0, size)], two), numbers.device)
        ((signs, means),) = table.encode(left, bucket)
        sent = torch.where(negative, levels[0], levels[1])
        yield signs, pack((~negative).to(torch.uint8), 1)
        yield means, torch.stack(levels[-1 - two :])
        yield left, numbers - sent
        table.average([(signs, means)] * 3, out, None)
        third = torch.zeros_like(sent).add_(sent, alpha=1 / 3)
        yield out, third.add_(sent, alpha=1 / 3).add_(sent, alpha=1 / 3)


ATTEMPTS = {"signs": _attempt}
