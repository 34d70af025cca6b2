"""Kernels for the host that send a bit per element of a bucket and the means of its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed
from lightning_gc.core.segments import PIECE, Pending
from lightning_gc.kernels.host.segments import jit, magnitude, multiply_add, times
from lightning_gc.kernels.shards import Payloads
from lightning_gc.kernels.signs import (
    LANES,
    SUMS,
    SignTable,
    attempt,
    by_torch,
    least_of,
    share_of,
)

_BLOCK = 2048  # elements whose signs lie in the first cache
_SPREAD = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint8).view(np.uint64)[:, 0]
"""The eight bits of each byte, a byte each."""


def mean(numbers: Tensor, share: float) -> Tensor:
    """Return the sum of ``numbers / PIECE`` times ``share``; see ``kernels.signs``."""
    sums = np.empty(-(-numbers.numel() // PIECE), np.float32)
    return torch.tensor(
        _mean(numbers.numpy(), _AS_IS, np.float32(share), sums), dtype=torch.float32, device="cpu"
    )


class Table(SignTable):
    """Encodes and decodes parts of a bucket; see ``kernels.signs.SignTable``."""

    guards = False

    @functools.cached_property
    def _places(self) -> list[np.ndarray[Any, Any]]:
        """By shard, where kernels find parts: first element, end, elements, first byte."""
        return [
            np.array([(row.start, row.stop, row.numel, row.byte) for row in rows], np.int64)
            for rows in self.layout.rows
        ]

    @functools.cached_property
    def _sums(self) -> np.ndarray[Any, Any]:
        longest = max(row.numel for rows in self.layout.rows for row in rows)
        return np.empty(-(-longest // PIECE), np.float32)

    def _in_row(self, mine: int) -> np.ndarray[Any, Any]:
        """Return the same of shard ``mine`` in a row of shards."""
        rows = self.layout.rows[mine]
        return np.array([(r.row, r.row + r.numel, r.numel, r.byte) for r in rows], np.int64)

    def _encode(
        self, packed: Sequence[Packed], buffer: Tensor, bucket: Bucket, mine: int | None
    ) -> None:
        places = self._places if mine is None else [self._in_row(mine)]
        least = np.float32(0.0 if mine is None else least_of(bucket.workers))
        of = _KINDS[self.levels], np.uint32(bucket.step & 0xFFFFFFFF), least
        for shard, payload in enumerate(packed):
            signs, levels = payload
            keys = self._keys_of(bucket, mine or shard)
            arrays = buffer.numpy(), places[shard], keys, signs.numpy(), levels.numpy()
            _encode(*arrays, self._sums, *of)
            payload.padding.zero_()

    def _keys_of(self, bucket: Bucket, shard: int) -> np.ndarray[Any, Any]:
        """Return the keys of a shard's coins, ``(n,)`` uint64; zeros if none are tossed."""
        count = len(self.layout.rows[shard])
        if self.levels != "votes":
            return np.zeros(count, np.uint64)
        names = self.layout.names[shard * count : (shard + 1) * count]
        return np.array([bucket.key(name) for name in names], np.uint64)

    def average(
        self, payloads: Payloads, out: Tensor, pending: Pending | None, mine: int | None = None
    ) -> bool:
        places = self._places if mine is None else [self._in_row(mine)]
        for shard, own in enumerate(places):
            sent = payloads if len(places) == 1 else payloads[shard : shard + 1]
            for sender, (signs, levels) in enumerate(sent):
                arrays = out.numpy(), own, signs.numpy(), levels.numpy()
                split, share = self.levels == "means", np.float32(1 / len(sent))
                _add(*arrays, share, split, sender == 0, _SPREAD)
            if self.levels == "votes" and mine is None:
                _decide(out.numpy(), own, np.float32(least_of(len(payloads))))
        return True


_KINDS = {"magnitude": 0, "means": 1, "votes": 2}
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
        sums[piece] = in_pairs(lanes, width) * share
    width = min(pieces, SUMS)
    lanes[:width] = 0
    for row in range(0, pieces, SUMS):
        for i in range(min(SUMS, pieces - row)):
            lanes[i] += sums[row + i]
    return in_pairs(lanes, width)


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
def in_pairs(lanes, width):
    """Return the sum of the first ``width`` lanes: of neighbours, again and again."""
    while width > 1:
        half = width // 2
        for i in range(half):
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1]
        if width % 2:
            lanes[half] = lanes[width - 1] + np.float32(0)
        width -= half
    return lanes[0]


@jit
def _encode(x, places, keys, signs, levels, sums, kind, step, least):
    """Encode the parts at ``places``: first element, end, elements with padding, first byte."""
    flags = np.empty(_BLOCK, np.uint8)
    one, scale = np.float32(1), np.float32(PIECE)
    for part in range(places.shape[0]):
        start, stop, numel, byte = places[part]
        own = x[start:stop]
        if kind == 1:
            negative = 0
            for i in range(own.size):
                negative += 1 if own[i] < 0 else 0
            below = _mean(own, _BELOW, scale * (one / np.float32(max(negative, 1))), sums)
            others = max(numel - negative, 1)
            above = _mean(own, _ABOVE, scale * (one / np.float32(others)), sums)
            levels[2 * part], levels[2 * part + 1] = below, above
        else:
            if kind == 0:
                above = _mean(own, _MAGNITUDES, scale * (one / np.float32(numel)), sums)
            else:
                above = np.float32(_exceeds(own, least))
            below = -above
            levels[part] = above
        for at in range(0, numel, _BLOCK):
            end = min(at + _BLOCK, numel)
            there = max(min(end, own.size) - at, 0)
            mine = own[at : at + there]
            if kind == 2:
                flags[there : end - at] = 2
                _vote(mine, least, flags)
                _toss(flags[: end - at], at, keys[part], step)
                _subtract(mine, below, above, flags)
            else:
                _take(mine, below, above, flags)
                flags[there : end - at] = 1  # zeros are not negative
            flags[end - at : (end - at + 7) // 8 * 8] = 0
            _gather(flags.view(np.uint64), signs[byte + at // 8 : byte + (end + 7) // 8])


@jit
def _exceeds(x, least):
    most = np.float32(0)
    for number in x:
        most = max(most, magnitude(number))  # NaN is never above
    return most > least


@jit
def _take(x, below, above, flags):
    for i in range(x.size):
        positive = x[i] >= 0  # not NaN
        x[i] -= above if positive else below
        flags[i] = positive


@jit
def _vote(x, least, flags):
    """Set flags to 1 for positive numbers, 0 for negative ones and 2 for zeros and NaN."""
    for i in range(x.size):
        flags[i] = (x[i] > least) if magnitude(x[i]) > least else 2


@jit
def _toss(flags, first, key, step):
    """Replace flags of 2 by coins; see ``kernels.signs.coins``."""
    low = np.uint32(key & np.uint64(0xFFFFFFFF))
    high = np.uint32((key >> np.uint64(32)) + np.uint64(step) * np.uint64(0x85EBCA6B))
    for i in range(flags.size):
        if flags[i] == 2:
            index = times(np.uint32(first + i + 1), 0x9E3779B9)
            flags[i] = _hashed(_hashed(low ^ index) ^ high) >> np.uint32(31)


@jit
def _hashed(x):
    x = times(x, 0x7FEB352D)
    x = times(x ^ (x >> np.uint32(15)), 0x846CA68B)
    return x ^ (x >> np.uint32(16))


@jit
def _subtract(x, below, above, flags):
    for i in range(x.size):
        x[i] -= above if flags[i] else below


@jit
def _gather(words, signs):
    for i in range(signs.size):
        signs[i] = (words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56)


@jit
def _add(out, places, signs, means, share, split, first, spread):
    flags = np.empty(_BLOCK, np.uint8)
    words = flags.view(np.uint64)
    for part in range(places.shape[0]):
        start, stop, _, byte = places[part]
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
def _decide(out, places, least):
    """Replace means of votes by their signs, and by 0 where they are below ``least``."""
    for part in range(places.shape[0]):
        mine = out[places[part, 0] : places[part, 1]]
        for i in range(mine.size):
            x = mine[i]
            mine[i] = np.float32(x >= least) - np.float32(x <= -least)


@jit
def _set(out, flags, low, high):
    for i in range(out.size):
        out[i] = high if flags[i] else low


@jit
def _add_levels(out, flags, below, above, share):
    for i in range(out.size):
        out[i] = multiply_add(above if flags[i] else below, share, out[i])


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    share = share_of(numbers.numel())
    yield mean(numbers.abs(), share), by_torch(numbers.abs(), share)
    yield from attempt(Table, numbers)


ATTEMPTS = {"signs": _attempt}
