"""numba's kernels that select elements of a whole bucket, code their positions and add them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core import elias_fano
from lightning_gc.kernels.host.segments import copy, jit
from lightning_gc.kernels.sparse import CORRECTIONS, FACTOR, Row, Selection

CHUNK = 1024
"""Elements that are compared with a limit together."""
WORD = 8
"""Comparisons that are looked at together."""
FEW = 1 << 12
"""Up to this many magnitudes take narrower digits."""
HITS = 64
"""Elements of a sample that are expected to be among the k largest, at most."""
APART = 9
"""Least distance of the elements of that sample; odd, or a matrix shows only some columns."""
MOST = 1 << 17
"""Elements of that sample at most."""
MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_RULES = {"largest": 0, "chunks": 0, "sampled": 1, "reaching": 2}
_FACTORS = np.array([FACTOR**i for i in range(CORRECTIONS + 1)], np.float32)
_LOWEST_BIT = np.array([0, *((n & -n).bit_length() - 1 for n in range(1, 256))], np.uint8)


def choose(buffer: Tensor, selection: Selection, step: int = 0) -> Tensor:
    """Return the ascending positions of the elements to send, ``(k,)`` int64.

    ``step`` moves the sample. ``buffer`` is not changed.
    """
    return torch.from_numpy(_chosen(buffer, selection, step))


def encode(buffer: Tensor, selection: Selection, step: int) -> tuple[Tensor, Tensor]:
    """Move the elements to send out of ``buffer`` into (values, coded positions)."""
    positions = _chosen(buffer, selection, step)
    values = buffer.new_empty(positions.size)
    _take(buffer.numpy(), positions, values.numpy())
    return values, _coded(positions, buffer.numel())


def _chosen(buffer: Tensor, selection: Selection, step: int) -> Any:
    bits, rows = buffer.numpy().view(np.int32), selection.on_host
    return _choose(bits, rows, _RULES[selection.rule], step)


def take(buffer: Tensor, positions: Tensor) -> Tensor:
    """Move elements out of ``buffer``, where zeros remain, to ``(k,)``."""
    values = buffer.new_empty(positions.numel())
    _take(buffer.numpy(), positions.numpy(), values.numpy())
    return values


def put(buffer: Tensor, positions: Tensor, values: Tensor) -> None:
    """Set elements of ``buffer``."""
    _put(buffer.numpy(), positions.numpy(), values.numpy())


def code(positions: Tensor, numel: int) -> Tensor:
    """Return ``elias_fano.encode(positions, numel)``."""
    return _coded(positions.numpy(), numel)


def _coded(positions: Any, numel: int) -> Tensor:
    chosen = len(positions)
    coded = torch.empty(elias_fano.coded_bytes(chosen, numel), dtype=torch.uint8, device="cpu")
    _code(positions, *elias_fano.layout(chosen, numel), coded.numpy())
    return coded


def places(coded: Tensor, chosen: int, numel: int) -> Tensor | None:
    """Return the coded positions, ``(chosen,)`` int64; None if they are impossible.

    Impossible positions do not ascend, leave the tensor, or are more or fewer than ``chosen``.
    """
    positions = torch.empty(chosen, dtype=torch.int64, device="cpu")
    length = elias_fano.map_bits(chosen, numel)
    where = *elias_fano.layout(chosen, numel), length, numel
    return positions if _places(coded.numpy(), *where, positions.numpy()) else None


def add(out: Tensor, positions: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale`` times ``values`` to elements of ``out``; a product is rounded first."""
    _add(out.numpy(), positions.numpy(), values.numpy(), np.float32(scale))


@jit
def _choose(bits, rows, rule, step):
    found, count = np.empty(2 * CHUNK, np.int64), 0
    histogram = np.zeros(2048, np.int64)
    for row in rows:
        start, stop, number, apart = row[1], row[2], row[3], row[4]
        if rule == 0:
            found, count = _largest(bits, start, stop, number, found, count, histogram)
        elif rule == 1:
            sample = _magnitudes(bits[start + step % apart : stop : apart])
            threshold, _ = _kth(sample, row[5], histogram)
            total = count
            for factor in _FACTORS:
                limit = _lowered(threshold, factor)
                found, total = _reaching(bits, start, stop, limit, found, count)
                if total - count >= row[6] or limit <= 1:
                    break
            count = _best(bits, found, count, total, number, histogram)
        else:
            found, count = _reaching(bits, start, stop, np.int32(row[7]), found, count)
    return found[:count].copy()


@jit
def _with_room(found, count, more):
    """Return ``found``, or a copy with room for ``more`` positions behind the first ``count``."""
    if found.size >= count + more:
        return found
    larger = np.empty(2 * (count + more), np.int64)
    copy(found[:count], larger)
    return larger


@jit
def _lowered(threshold, factor):
    """Return the bits of a threshold times ``factor``; all but zeros reach it, all reach NaN."""
    word = np.empty(1, np.int32)
    word[0] = threshold
    if threshold > _INFINITY:
        return np.int32(0)
    word.view(np.float32)[0] *= factor
    return max(word[0], np.int32(1))


@jit
def _magnitudes(bits):
    found = np.empty(bits.size, np.int32)
    for i in range(bits.size):
        found[i] = bits[i] & MAGNITUDE
    return found


@jit
def _largest(bits, start, stop, k, found, count, histogram):
    """Append the positions of the k largest; of equal ones the first."""
    numel = stop - start
    if k < numel:
        apart = max(numel // max(min(HITS * numel // k, MOST), 1), APART) | 1
        sample = _magnitudes(bits[start:stop:apart])
        expected = sample.size * k / numel
        rank = int(1.05 * expected + 4 * expected**0.5) + 1
        if rank < sample.size // 4:
            limit, _ = _kth(sample, rank, histogram)
            lowest = max(limit, np.int32(1))
            found, total = _reaching(bits, start, stop, lowest, found, count)
            if total - count >= k:
                return found, _best(bits, found, count, total, k, histogram)
            if limit == 0:
                found = _with_room(found, total, k)
                return found, _with_zeros(bits, start, found, count, total, k)
    found = _with_room(found, count, numel)
    for i in range(numel):
        found[count + i] = start + i
    return found, _best(bits, found, count, count + numel, k, histogram)


@jit
def _with_zeros(bits, start, found, count, total, k):
    """Add the first zeros to ``found[count:total]``, the others, until they are k in all."""
    others = found[count:total].copy()
    zeros, at, i = k - others.size, start, 0
    while zeros > 0:
        if bits[at] & MAGNITUDE:
            i += 1
        else:
            zeros -= 1
        found[count] = at
        count += 1
        at += 1
    rest = others[i:]
    copy(rest, found[count:])
    return count + rest.size


@jit
def _best(bits, found, count, total, k, histogram):
    """Keep the k largest of ``found[count:total]``, of equal ones the first; return their end."""
    if total - count <= k:
        return total
    magnitudes = np.empty(total - count, np.int32)
    for i in range(magnitudes.size):
        magnitudes[i] = bits[found[count + i]] & MAGNITUDE
    limit, needed = _kth(magnitudes, k, histogram)
    first = count
    for i in range(magnitudes.size):
        position, x = found[first + i], magnitudes[i]
        equal = x == limit and needed > 0
        needed -= equal
        found[count] = position
        count += equal or x > limit
    return count


@jit
def _kth(magnitudes, k, histogram):
    """Return the k-th largest, and how many equal to it are among the k largest."""
    if k < 1:
        return MAGNITUDE, 0
    width, top = (8, 23) if magnitudes.size < FEW else (11, 20)
    prefix, place = 0, top
    while width > 0:
        size = 1 << width
        histogram[:size] = 0
        for x in magnitudes:
            if x >> (place + width) == prefix:
                histogram[(x >> place) & (size - 1)] += 1
        digit = size - 1
        while histogram[digit] < k:
            k -= histogram[digit]
            digit -= 1
        prefix = (prefix << width) | digit
        width = min(width, place)
        place -= width
    return np.int32(prefix), k


@jit
def _reaching(bits, start, stop, limit, found, count):
    """Append the positions of magnitudes from ``limit`` on; return ``found`` and their end."""
    reach = np.zeros(CHUNK, np.uint8)
    words = reach.view(np.uint64)
    for first in range(start, stop, CHUNK):
        found = _with_room(found, count, CHUNK)
        chunk = bits[first : min(first + CHUNK, stop)]
        _compare(chunk, limit, reach)
        reach[chunk.size : (chunk.size + WORD - 1) // WORD * WORD] = 0
        for word in range((chunk.size + WORD - 1) // WORD):
            if words[word]:
                for i in range(word * WORD, word * WORD + WORD):
                    found[count] = first + i
                    count += reach[i]
    return found, count


@jit
def _compare(bits, limit, reach):
    for i in range(bits.size):
        reach[i] = np.int32(bits[i] & MAGNITUDE) >= limit


@jit
def _take(x, positions, values):
    for i in range(positions.size):
        values[i] = x[positions[i]]
        x[positions[i]] = 0


@jit
def _put(x, positions, values):
    for i in range(positions.size):
        x[positions[i]] = values[i]


@jit
def _code(positions, low, map_at, coded):
    chosen = positions.size
    whole, rest = low // 8, low % 8
    coded[map_at:] = 0
    word, held, at = 0, 0, whole * chosen
    for i in range(chosen):
        x = positions[i]
        bit = (x >> low) + i
        coded[map_at + (bit >> 3)] |= np.uint8(1 << (bit & 7))
        for j in range(whole):
            coded[j * chosen + i] = np.uint8((x >> (8 * j)) & 255)
        word |= ((x >> (8 * whole)) & ((1 << rest) - 1)) << held
        held += rest
        if held >= 8:
            coded[at] = np.uint8(word & 255)
            word >>= 8
            held -= 8
            at += 1
    if held > 0:
        coded[at] = np.uint8(word)


@jit
def _places(coded, low, map_at, length, numel, positions):
    chosen = positions.size
    whole, rest = low // 8, low % 8
    plane = whole * chosen
    i = 0
    last = np.int64(-1)
    for at in range((length + 7) // 8):
        byte = np.int64(coded[map_at + at])
        if 8 * at + 8 > length:
            byte &= (1 << (length - 8 * at)) - 1
        while byte:
            if i == chosen:
                return False
            place = 8 * at + np.int64(_LOWEST_BIT[byte]) - i
            byte &= byte - 1
            bits = np.int64(0)
            if rest > 0:
                bit = i * rest
                bits = np.int64(coded[plane + (bit >> 3)]) >> (bit & 7)
                if (bit & 7) + rest > 8:
                    bits |= np.int64(coded[plane + (bit >> 3) + 1]) << (8 - (bit & 7))
                bits = (bits & ((1 << rest) - 1)) << (8 * whole)
            for j in range(whole):
                bits |= np.int64(coded[j * chosen + i]) << (8 * j)
            place = (place << low) | bits
            if place <= last or place >= numel:
                return False
            positions[i] = place
            last = np.int64(place)
            i += 1
    return i == chosen


@jit
def _add(out, positions, values, scale):
    for i in range(positions.size):
        out[positions[i]] += values[i] * scale


def _selections(numbers: Tensor) -> Iterator[tuple[Any, Any]]:
    numbers = torch.linspace(-1, 1, 2 * FEW, dtype=torch.float32, device="cpu").pow(3)
    for numel in (100, 2 * FEW):
        x = numbers[:numel]
        magnitudes = x.abs()
        wanted = magnitudes.sort(descending=True, stable=True).indices[:30].sort().values
        row = Row(0, 0, numel, 30, apart=3, rank=8, least=20, limit=0x3E800000)
        yield choose(x, Selection("largest", (row,))), wanted
        reaching = (magnitudes >= 0.25).nonzero().view(-1)
        yield choose(x, Selection("reaching", (row,))), reaching
        threshold = magnitudes[1::3].sort(descending=True).values[7]
        limits = [threshold * factor for factor in _FACTORS.tolist()]
        found = [(magnitudes >= limit).nonzero().view(-1) for limit in limits]
        enough = next(each for each in found if len(each) >= 20)
        yield choose(x, Selection("sampled", (row,)), 1), enough if len(enough) < 30 else wanted


def _positions(numbers: Tensor) -> Iterator[tuple[Any, Any]]:
    numbers = torch.linspace(-1, 1, 3000, dtype=torch.float32, device="cpu")
    for apart in (1, 7, 700):
        chosen = torch.arange(0, 3000, apart, device="cpu")
        left, values = numbers.clone(), numbers[chosen]
        yield take(left, chosen), values
        yield left, numbers.index_fill(0, chosen, 0)
        put(left, chosen, values)
        yield left, numbers
        coded = elias_fano.encode(chosen, 3000)
        yield code(chosen, 3000), coded
        found = places(coded, len(chosen), 3000)
        yield chosen if found is None else found, chosen
        add(left, chosen, values, 1 / 3)
        yield left, numbers.index_add(0, chosen, values, alpha=1 / 3)


ATTEMPTS = {"selection": _selections, "positions": _positions}
