"""Triton kernels that select elements of a whole bucket, code their positions and add them.

A magnitude is ordered like its 31 bits. The k-th largest of each part is found by histograms of
the first 9 bits, of the next 11 among those with the same first bits, and of the last 11. All
parts are read at once, and no number is read on the host.

Few elements share the first bits, so the GPU's memory counts them. A program counts all of the
first digits itself, which takes time in proportion to their values.

Reference:
    Alabi et al., "Fast k-Selection Algorithms for Graphics Processing Units", JEA 2012.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core import elias_fano
from lightning_gc.core.message import (
    ALIGNMENT,
    Message,
    Packed,
    evenly,
    packed,
    reserve,
    storage_of,
)
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.casts import from_half, to_half
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.segments import ROW, arrived, compensated, given, sample
from lightning_gc.kernels.sparse import CORRECTIONS, FACTOR, Row, Selection

FIRST, BINS = 512, 2048
"""Values of the first 9 bits of a magnitude, and of the next 11 and the last 11."""
WIDE = {"ROW": 4096, "num_warps": 8}
"""A program's elements at a time where it counts all of them."""
FOLD = 256
"""Numbers of pieces or tiles that a program adds at a time."""
GROUPS = 128
"""Groups of eight positions that one program codes."""
TILE = 4096
"""Bits of a bitmap that one program decodes."""


@triton.jit
def column(table, index, parts, part):
    """Return a number of a part, in the order of ``kernels.sparse.Row``.

    8: its first piece; 9: the number of elements sent of the parts before.
    """
    return tl.load(table + index * parts + part)


@triton.jit
def piece_of(pieces, count, piece):
    """Return the part of a piece, its first element and its end."""
    return (
        tl.load(pieces + piece),
        tl.load(pieces + count + piece),
        tl.load(pieces + 2 * count + piece),
    )


@triton.jit
def is_idle(peaks, table, parts, part, GUARDED: tl.constexpr):
    """Return whether zeros are sent for a part, because its gradient is zero."""
    idle = part < 0
    if GUARDED:
        idle = tl.load(peaks + column(table, 0, parts, part)) == 0.0
    return idle


@triton.jit
def bins(digit, valid, SIZE: tl.constexpr):
    """Return how often each digit occurs among the valid ones."""
    counts = tl.histogram(tl.where(valid, digit, 0), SIZE)
    others = tl.sum(tl.where(valid, 0, 1), axis=0)
    return counts - tl.where(tl.arange(0, SIZE) == 0, others, 0)


@triton.jit
def digit_of(counts, wanted, SIZE: tl.constexpr):
    """Return the digit of the wanted-th largest, and its rank among numbers with this digit."""
    above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    hit = (above < wanted) & (above + counts >= wanted)
    digit = tl.sum(tl.where(hit, tl.arange(0, SIZE), 0), axis=0)
    return digit, wanted - tl.sum(tl.where(hit, above, 0), axis=0)


@triton.jit
def count_digits(counts, digit, valid, SIZE: tl.constexpr):
    """Add to ``counts`` how often each digit occurs among the valid ones."""
    most = tl.max(tl.where(valid, digit, -1), axis=0)
    if most >= 0:
        # Many equal numbers, such as zeros, would have to wait for one another.
        if tl.min(tl.where(valid, digit, SIZE), axis=0) == most:
            tl.atomic_add(counts + most, tl.sum(tl.where(valid, 1, 0), axis=0), sem="relaxed")
        else:
            tl.atomic_add(counts + digit, tl.where(valid, 1, 0), mask=valid, sem="relaxed")


@triton.jit
def sum_of(numbers, first, stop, FOLD: tl.constexpr):
    """Return the sum of ``numbers[first:stop]``."""
    total = tl.zeros([FOLD], tl.int32)
    begin = first + stop * 0  # a tensor, where ``first`` is a constant
    while begin < stop:
        at = begin + tl.arange(0, FOLD)
        total += tl.load(numbers + at, mask=at < stop, other=0)
        begin += FOLD
    return tl.sum(total, axis=0)


@triton.jit
def lowered(threshold, factor):
    """Return the bits of the threshold times ``factor``; all but zeros reach it, all reach NaN."""
    bits = magnitude_bits(tl.load(threshold) * factor)
    return tl.where(bits > 0x7F800000, 0, tl.maximum(bits, 1))


@kernel()
def sample_thresholds(
    buffer,
    grad,
    decay,
    gain,
    peaks,
    table,
    parts,
    step,
    thresholds,
    ADD: tl.constexpr,
    GUARDED: tl.constexpr,
    BINS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Find the magnitude of the wanted rank in the sample of each part; one program a part."""
    part = tl.program_id(0)
    apart = column(table, 4, parts, part)
    wanted = column(table, 5, parts, part)
    begin = column(table, 1, parts, part) + step % apart
    size = (column(table, 2, parts, part) - begin + apart - 1) // apart
    idle = is_idle(peaks, table, parts, part, GUARDED)
    prefix = part * 0
    for index in tl.static_range(3):  # 11, 11 and 9 bits
        counts = tl.zeros([BINS], tl.int32)
        i = size * 0
        while i < size:
            inside = i + tl.arange(0, ROW) < size
            here = begin + apart * (i + tl.arange(0, ROW))
            x = compensated(buffer, grad, here, inside, decay, gain, ADD)
            bits = tl.where(idle, 0, magnitude_bits(x))
            if index == 0:
                counts += bins(bits >> 20, inside, BINS)
            elif index == 1:
                counts += bins((bits >> 9) & 2047, inside & ((bits >> 20) == prefix), BINS)
            else:
                counts += bins(bits & 511, inside & ((bits >> 9) == prefix), BINS)
            i += ROW
        digit, wanted = digit_of(counts, wanted, BINS)
        prefix = (prefix << (11 if index < 2 else 9)) | digit
    tl.store(thresholds + part, prefix.to(tl.float32, bitcast=True))


@kernel()
def first_digit(
    buffer,
    grad,
    decay,
    gain,
    peaks,
    pieces,
    count,
    table,
    parts,
    histogram,
    thresholds,
    reached,
    factor1,
    factor2,
    factor3,
    factor4,
    ADD: tl.constexpr,
    GUARDED: tl.constexpr,
    SAMPLED: tl.constexpr,
    FIRST: tl.constexpr,
    ROW: tl.constexpr,
):
    """Add the gradient, and count the first digits and how many reach each threshold."""
    part, at, stop = piece_of(pieces, count, tl.program_id(0))
    idle = is_idle(peaks, table, parts, part, GUARDED)
    counts = tl.zeros([FIRST], tl.int32)
    if SAMPLED:
        limit0 = lowered(thresholds + part, 1.0)
        limit1 = lowered(thresholds + part, factor1)
        limit2 = lowered(thresholds + part, factor2)
        limit3 = lowered(thresholds + part, factor3)
        limit4 = lowered(thresholds + part, factor4)
        reach0 = tl.zeros([ROW], tl.int32)
        reach1 = tl.zeros([ROW], tl.int32)
        reach2 = tl.zeros([ROW], tl.int32)
        reach3 = tl.zeros([ROW], tl.int32)
        reach4 = tl.zeros([ROW], tl.int32)
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        if ADD:
            kept = tl.where(is_finite(x), x, tl.where(idle, 0.0, x))
            tl.store(buffer + here, kept, mask=inside)
        bits = tl.where(idle, 0, magnitude_bits(x))
        counts += bins(bits >> 22, inside, FIRST)
        if SAMPLED:
            reach0 += tl.where(inside & (bits >= limit0), 1, 0)
            reach1 += tl.where(inside & (bits >= limit1), 1, 0)
            reach2 += tl.where(inside & (bits >= limit2), 1, 0)
            reach3 += tl.where(inside & (bits >= limit3), 1, 0)
            reach4 += tl.where(inside & (bits >= limit4), 1, 0)
        at += ROW
    tl.atomic_add(histogram + part * FIRST + tl.arange(0, FIRST), counts, mask=counts > 0)
    if SAMPLED:
        tl.atomic_add(reached + part, tl.sum(reach0, axis=0))
        tl.atomic_add(reached + parts + part, tl.sum(reach1, axis=0))
        tl.atomic_add(reached + 2 * parts + part, tl.sum(reach2, axis=0))
        tl.atomic_add(reached + 3 * parts + part, tl.sum(reach3, axis=0))
        tl.atomic_add(reached + 4 * parts + part, tl.sum(reach4, axis=0))


@kernel()
def next_digit(
    buffer,
    peaks,
    pieces,
    count,
    table,
    parts,
    histogram,
    finer,
    reached,
    numbers,
    before,
    after,
    GUARDED: tl.constexpr,
    SAMPLED: tl.constexpr,
    THIRD: tl.constexpr,
    BINS: tl.constexpr,
    FIRST: tl.constexpr,
    ROW: tl.constexpr,
):
    """Count the next digits of elements that share the digits of the k-th largest so far.

    ``before`` and ``after`` hold these digits, and which of the elements that share them is the
    k-th. All programs of a part store the same.
    """
    part, at, stop = piece_of(pieces, count, tl.program_id(0))
    idle = is_idle(peaks, table, parts, part, GUARDED)
    if THIRD:
        counts = tl.load(histogram + part * BINS + tl.arange(0, BINS))
        wanted = tl.load(before + parts + part)
        digit, left = digit_of(counts, wanted, BINS)
        prefix = (tl.load(before + part) << 11) | digit
    else:
        counts = tl.load(histogram + part * FIRST + tl.arange(0, FIRST))
        wanted = column(table, 3, parts, part)
        if SAMPLED:
            least = column(table, 6, parts, part)
            found = tl.load(reached + part)
            for level in tl.static_range(1, 5):
                more = tl.load(reached + level * parts + part)
                found = tl.where(found < least, more, found)
            wanted = tl.minimum(wanted, found)
            tl.store(numbers + part, wanted)
        prefix, left = digit_of(counts, wanted, FIRST)
        if SAMPLED:
            prefix = tl.where(wanted > 0, prefix, FIRST)  # none has it, and none is sent
    tl.store(after + part, prefix)
    tl.store(after + parts + part, left)
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = tl.load(buffer + here, mask=inside, other=0.0)
        bits = tl.where(idle, 0, magnitude_bits(x))
        if THIRD:
            known, following = bits >> 11, bits & (BINS - 1)
        else:
            known, following = bits >> 22, (bits >> 11) & (BINS - 1)
        count_digits(finer + part * BINS, following, inside & (known == prefix), BINS)
        at += ROW


@kernel()
def count_pieces(
    buffer,
    peaks,
    pieces,
    count,
    table,
    parts,
    histogram,
    before,
    limits,
    larger,
    equal,
    numbers,
    total,
    flag,
    sent_flag,
    GUARDED: tl.constexpr,
    SAMPLED: tl.constexpr,
    BINS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Count elements above the k-th largest and equal to it; store it, and how many are needed."""
    piece = tl.program_id(0)
    part, at, stop = piece_of(pieces, count, piece)
    idle = is_idle(peaks, table, parts, part, GUARDED)
    counts = tl.load(histogram + part * BINS + tl.arange(0, BINS))
    digit, needed = digit_of(counts, tl.load(before + parts + part), BINS)
    limit = (tl.load(before + part) << 11) | digit
    if SAMPLED:
        number = tl.load(numbers + part)
        limit = tl.where(number > 0, limit, 0x7FFFFFFF)
        needed = tl.where(number > 0, needed, 0)
        if at == column(table, 1, parts, part):
            tl.atomic_add(total, number)
        if piece == 0:
            tl.store(sent_flag, tl.load(flag))
    tl.store(limits + part, limit)
    tl.store(limits + parts + part, needed)
    above = tl.zeros([ROW], tl.int32)
    same = tl.zeros([ROW], tl.int32)
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = tl.load(buffer + here, mask=inside, other=0.0)
        bits = tl.where(idle, 0, magnitude_bits(x))
        above += tl.where(inside & (bits > limit), 1, 0)
        same += tl.where(inside & (bits == limit), 1, 0)
        at += ROW
    tl.store(larger + piece, tl.sum(above, axis=0))
    tl.store(equal + piece, tl.sum(same, axis=0))


@kernel()
def count_reaching(
    buffer,
    grad,
    decay,
    gain,
    peaks,
    pieces,
    count,
    table,
    parts,
    limits,
    larger,
    equal,
    numbers,
    total,
    flag,
    sent_flag,
    ADD: tl.constexpr,
    GUARDED: tl.constexpr,
    ROW: tl.constexpr,
):
    """Add the gradient, and count elements that reach their part's limit."""
    piece = tl.program_id(0)
    part, at, stop = piece_of(pieces, count, piece)
    idle = is_idle(peaks, table, parts, part, GUARDED)
    if piece == 0:
        tl.store(sent_flag, tl.load(flag))
    limit = column(table, 7, parts, part) - 1
    tl.store(limits + part, limit)
    tl.store(limits + parts + part, 0)
    above = tl.zeros([ROW], tl.int32)
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        if ADD:
            kept = tl.where(is_finite(x), x, tl.where(idle, 0.0, x))
            tl.store(buffer + here, kept, mask=inside)
        bits = tl.where(idle, 0, magnitude_bits(x))
        above += tl.where(inside & (bits > limit), 1, 0)
        at += ROW
    found = tl.sum(above, axis=0)
    tl.store(larger + piece, found)
    tl.store(equal + piece, 0)
    tl.atomic_add(numbers + part, found)
    tl.atomic_add(total, found)


@kernel()
def move_chosen(
    buffer,
    peaks,
    pieces,
    count,
    table,
    parts,
    limits,
    numbers,
    larger,
    equal,
    values,
    positions,
    number,
    bitmap,
    zeroed,
    length,
    flag,
    sent_flag,
    padding,
    padded,
    seal_place,
    seal,
    KEEP: tl.constexpr,
    GUARDED: tl.constexpr,
    BFLOAT: tl.constexpr,
    SEALED: tl.constexpr,
    FOLD: tl.constexpr,
    ROW: tl.constexpr,
):
    """Move what is sent out of the buffer, ascending; of equal magnitudes the first are sent.

    Also zero ``zeroed`` bytes of the bitmap, and write the end of the message.
    """
    piece = tl.program_id(0)
    if piece == 0:
        end_message(flag, sent_flag, padding, padded)
        if SEALED:
            tl.store(seal_place, seal)
            tl.store(seal_place + 1, -1)  # a seal is negative
    byte = piece * zeroed
    end = tl.minimum(byte + zeroed, length)
    while byte < end:
        each = byte + tl.arange(0, ROW)
        tl.store(bitmap + each, tl.zeros([ROW], tl.uint8), mask=each < end)
        byte += ROW

    part, at, stop = piece_of(pieces, count, piece)
    idle = is_idle(peaks, table, parts, part, GUARDED)
    limit = tl.load(limits + part)
    needed = tl.load(limits + parts + part)
    first = column(table, 8, parts, part)
    start = sum_of(numbers, 0, part, FOLD) + sum_of(larger, first, piece, FOLD)
    ties = sum_of(equal, first, piece, FOLD)
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = tl.load(buffer + here, mask=inside, other=0.0)
        bits = tl.where(idle, 0, magnitude_bits(x))
        more = tl.where(inside & (bits > limit), 1, 0)
        same = tl.where(inside & (bits == limit), 1, 0)
        chosen = (more == 1) | ((same == 1) & (ties + tl.cumsum(same, axis=0) <= needed))
        ones = tl.where(chosen, 1, 0)
        rank = start + tl.minimum(ties, needed) + tl.cumsum(ones, axis=0) - 1
        chosen = chosen & (rank < number)  # more only if the number was damaged on its way
        sent = x
        if KEEP:
            sent = tl.where(idle, 0.0, x)
        left = tl.zeros([ROW], tl.float32)
        if BFLOAT:
            half = to_half(within_bfloat(sent), BFLOAT)
            tl.store(values + rank, half, mask=chosen)
            left = sent - from_half(half, BFLOAT)
            left = tl.where(is_finite(left), left, 0.0)
        else:
            tl.store(values + rank, sent, mask=chosen)
        tl.store(positions + rank, here, mask=chosen)
        if KEEP:
            # No error keeps a number that is not finite.
            left = tl.where(chosen, left, 0.0)
            gone = tl.where(chosen | (inside & (bits >= 0x7F800000)), 1, 0)
            tl.store(buffer + here, left, mask=tl.where(idle, 0, gone) == 1)
        start += tl.sum(more, axis=0)
        ties += tl.sum(same, axis=0)
        at += ROW


@kernel()
def take_chunks(
    buffer,
    grad,
    decay,
    gain,
    peaks,
    tiles,
    count,
    table,
    parts,
    values,
    positions,
    bitmap,
    zeroed,
    length,
    flag,
    sent_flag,
    padding,
    padded,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    GUARDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
):
    """Add the gradient, and move the largest of each of ROWS chunks out of the buffer.

    Also zero ``zeroed`` bytes of the bitmap, and write the end of the message.
    """
    tile = tl.program_id(0)
    if tile == 0:
        end_message(flag, sent_flag, padding, padded)
    byte = tile * zeroed
    end = tl.minimum(byte + zeroed, length)
    while byte < end:
        each = byte + tl.arange(0, ROW)
        tl.store(bitmap + each, tl.zeros([ROW], tl.uint8), mask=each < end)
        byte += ROW

    part = tl.load(tiles + tile)
    chunk = tl.load(tiles + count + tile) + tl.arange(0, ROWS)
    stop = column(table, 2, parts, part)
    size = column(table, 4, parts, part)
    number = column(table, 5, parts, part)
    idle = is_idle(peaks, table, parts, part, GUARDED)
    begin = column(table, 1, parts, part) + chunk * size
    wanted = tl.where(begin + size <= stop, number, column(table, 6, parts, part))
    wanted = tl.where(begin < stop, wanted, 0)
    lane = tl.arange(0, WIDTH)[None, :]
    here = begin[:, None] + lane  # (ROWS, WIDTH)
    inside = (lane < size) & (here < stop)
    x = compensated(buffer, grad, here, inside, decay, gain, ADD)
    bits = tl.where(inside, tl.where(idle, 0, magnitude_bits(x)), -1)
    limit = wanted * 0  # the greatest number that as many reach as are wanted, bit by bit
    step = (part * 0) + (1 << 30)
    while step > 0:
        reach = tl.sum(tl.where(bits >= (limit | step)[:, None], 1, 0), axis=1)
        limit = tl.where(reach >= wanted, limit | step, limit)
        step = step >> 1
    above = bits > limit[:, None]
    equal = tl.where(bits == limit[:, None], 1, 0)
    needed = wanted - tl.sum(tl.where(above, 1, 0), axis=1)
    chosen = above | ((equal == 1) & (tl.cumsum(equal, axis=1) <= needed[:, None]))
    first = column(table, 9, parts, part) + chunk * number
    rank = first[:, None] + tl.cumsum(tl.where(chosen, 1, 0), axis=1) - 1
    sent = x
    if KEEP:
        sent = tl.where(idle, 0.0, x)
    tl.store(values + rank, sent, mask=chosen)
    tl.store(positions + rank, here, mask=chosen)
    if ADD:
        left = tl.where(idle, x, tl.where(chosen, 0.0, x))
        tl.store(buffer + here, tl.where(is_finite(left), left, 0.0), mask=inside)
    elif KEEP:
        tl.store(buffer + here, tl.zeros_like(x), mask=chosen)


@triton.jit
def within_bfloat(x):
    """Return finite numbers that bfloat16 would round to infinity as its largest; others as is."""
    bits = x.to(tl.int32, bitcast=True)
    large = (magnitude_bits(x) > 0x7F7F0000) & is_finite(x)
    clamped = (bits & -2147483648) | 0x7F7F0000
    return tl.where(large, clamped, bits).to(tl.float32, bitcast=True)


@triton.jit
def coding(chosen, numel):
    """Return what ``elias_fano`` derives from k and n: low bits, their bytes, bits of the map."""
    ratio = numel // tl.maximum(chosen, 1)
    low = 0
    while (ratio >> (low + 1)) > 0:
        low += 1
    rest = low % 8
    map_at = low // 8 * chosen + (chosen * rest + 7) // 8
    length = tl.where(chosen > 0, chosen + ((numel - 1) >> low) + 1, 0)
    return low, map_at, length


@kernel()
def code_positions(positions, coded, map_at, end, chosen, low, GROUPS: tl.constexpr):
    """Write the low bits of eight positions to ``low`` bytes, and set bits of the bitmap.

    The bitmap is zero before. The first position with a bit in a byte writes the byte, and looks at
    the seven positions that follow: no atomics.
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)[None, :]
    i = group[:, None] * 8 + lane
    inside = i < chosen
    position = tl.load(positions + i, mask=inside, other=0)
    bits = tl.where(inside, position & ((1 << low) - 1), 0)
    whole = low // 8
    rest = low % 8
    j = 0
    while j < whole:
        tl.store(coded + j * chosen + i, ((bits >> (8 * j)) & 255).to(tl.uint8), mask=inside)
        j += 1
    if rest > 0:
        plane = coded + whole * chosen
        word = tl.sum((bits >> (8 * whole)).to(tl.int64) << (rest * lane), axis=1)
        length = chosen // 8 * rest + (chosen % 8 * rest + 7) // 8
        j = 0
        while j < rest:
            byte = group * rest + j
            tl.store(plane + byte, ((word >> (8 * j)) & 255).to(tl.uint8), mask=byte < length)
            j += 1
    bit = (position >> low) + i
    earlier = tl.load(positions + i - 1, mask=inside & (i > 0), other=0)
    last = tl.where(i > 0, ((earlier >> low) + i - 1) >> 3, -1)
    leads = inside & (last != (bit >> 3)) & (bit >= 0) & (map_at + (bit >> 3) < end)
    value = tl.where(leads, 1 << (bit & 7), 0)
    for j in tl.static_range(1, 8):
        there = leads & (i + j < chosen)
        other = (tl.load(positions + i + j, mask=there, other=0) >> low) + i + j
        value |= tl.where(there & ((other >> 3) == (bit >> 3)), 1 << (other & 7), 0)
    tl.store(coded + map_at + (bit >> 3), value.to(tl.uint8), mask=leads)


@triton.jit
def row_of(coded, apart, slope, chosen, counts):
    """Return the first byte of a worker's coded positions."""
    worker = tl.program_id(1)
    return coded + worker.to(tl.int64) * apart + (chosen - tl.load(counts)).to(tl.int64) * slope


@triton.jit
def set_bits(bitmap, bit, inside):
    """Return bits of a bitmap, int32."""
    byte = tl.load(bitmap + bit // 8, mask=inside, other=0).to(tl.int32)
    return (byte >> (bit % 8)) & 1


@triton.jit
def low_bits(coded, i, inside, chosen, low):
    """Return the low bits of the coded positions ``i``."""
    whole = low // 8
    rest = low % 8
    found = tl.zeros_like(i)
    j = 0
    while j < whole:
        byte = tl.load(coded + j * chosen + i, mask=inside, other=0)
        found |= byte.to(tl.int32) << (8 * j)
        j += 1
    plane = coded + whole * chosen
    first = i * rest // 8
    shift = i * rest % 8
    one = tl.load(plane + first, mask=inside & (shift + rest > 0), other=0).to(tl.int32)
    two = tl.load(plane + first + 1, mask=inside & (shift + rest > 8), other=0).to(tl.int32)
    return found | ((((one | (two << 8)) >> shift) & ((1 << rest) - 1)) << (8 * whole))


@kernel()
def count_bits(
    coded,
    apart,
    slope,
    counts,
    counts_apart,
    numel,
    tiles,
    found,
    wrong,
    TILE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Count the set bits of each tile of each worker's bitmap."""
    tile = tl.program_id(0)
    worker = tl.program_id(1)
    if tile == 0:
        tl.store(wrong + worker, 0)
    chosen = tl.load(counts + worker * counts_apart)
    _, map_at, length = coding(chosen, numel)
    bitmap = row_of(coded, apart, slope, chosen, counts) + map_at
    total = tl.zeros([ROW], tl.int32)
    for step in tl.static_range(TILE // ROW):
        bit = tile * TILE + step * ROW + tl.arange(0, ROW)
        total += set_bits(bitmap, bit, bit < length)
    tl.store(found + worker * tiles + tile, tl.sum(total, axis=0))


@kernel()
def find_places(
    coded,
    apart,
    slope,
    counts,
    counts_apart,
    numel,
    tiles,
    found,
    wrong,
    positions,
    most,
    TILE: tl.constexpr,
    FOLD: tl.constexpr,
    ROW: tl.constexpr,
):
    """Decode positions; ``wrong`` is set if they do not ascend below ``numel``, k of them."""
    tile = tl.program_id(0)
    worker = tl.program_id(1)
    chosen = tl.load(counts + worker * counts_apart)
    low, map_at, length = coding(chosen, numel)
    mine = row_of(coded, apart, slope, chosen, counts)
    own = found + worker * tiles
    before = sum_of(own, 0, tile, FOLD)
    bad = tl.zeros([ROW], tl.int32)
    if tile == 0:
        bad += tl.where(sum_of(own, 0, tiles, FOLD) != chosen, 1, 0)
    for step in tl.static_range(TILE // ROW):
        bit = tile * TILE + step * ROW + tl.arange(0, ROW)
        on = set_bits(mine + map_at, bit, bit < length)
        i = before + tl.cumsum(on, axis=0) - 1
        there = (on == 1) & (i < chosen)
        place = ((bit - i) << low) | low_bits(mine, i, there, chosen, low)
        # Positions of neighbouring bits share their high bits, so their low bits must ascend.
        next_to = there & (i > 0)
        next_to = next_to & (set_bits(mine + map_at, bit - 1, next_to) == 1)
        last = low_bits(mine, i - 1, next_to, chosen, low)
        falls = next_to & ((place & ((1 << low) - 1)) <= last)
        bad += tl.where(there & ((place >= numel) | falls), 1, 0)
        tl.store(positions + worker.to(tl.int64) * most + i, place, mask=there)
        before += tl.sum(on, axis=0)
    if tl.sum(bad, axis=0) > 0:
        tl.store(wrong + worker, 1)


@kernel()
def add_all(
    values,
    apart,
    counts,
    counts_apart,
    positions,
    most,
    wrong,
    workers,
    share,
    out,
    flags,
    flags_apart,
    senders,
    starts,
    pieces,
    count,
    table,
    parts,
    BFLOAT: tl.constexpr,
    ROW: tl.constexpr,
):
    """Write a piece of the mean: zeros, and each worker's elements, in the workers' order."""
    part, start, stop = piece_of(pieces, count, tl.program_id(0))
    at = start
    while at < stop:
        here = at + tl.arange(0, ROW)
        tl.store(out + here, tl.zeros([ROW], tl.float32), mask=here < stop)
        at += ROW
    mine = positions
    theirs = values
    bad = 0
    worker = 0
    while worker < workers:
        tl.debug_barrier()  # other threads have added the elements of the worker before
        chosen = tl.load(counts + worker * counts_apart)
        bad += tl.load(wrong + worker)
        low = chosen * 0
        high = chosen
        while low < high:  # the first position from ``start`` on
            middle = (low + high) // 2
            after = tl.load(mine + middle) >= start
            low = tl.where(after, low, middle + 1)
            high = tl.where(after, middle, high)
        more = low < chosen
        while more:
            i = low + tl.arange(0, ROW)
            place = tl.load(mine + i, mask=i < chosen, other=2147483647)
            inside = place < stop
            value = tl.load(theirs + i, mask=inside, other=0)
            if BFLOAT:
                value = from_half(value, BFLOAT)
            kept = tl.load(out + place, mask=inside, other=0.0)
            tl.store(out + place, kept + value * share, mask=inside)
            low += ROW
            more = tl.sum(tl.where(inside, 1, 0), axis=0) == ROW
        mine += most
        theirs += apart
        worker += 1
    tl.debug_barrier()
    if bad > 0:
        at = start
        while at < stop:
            here = at + tl.arange(0, ROW)
            tl.store(out + here, tl.zeros([ROW], tl.float32) + float("nan"), mask=here < stop)
            at += ROW
    elif start == tl.load(starts + column(table, 0, parts, part)):
        tl.store(out + start, tl.load(out + start) + arrived(flags, flags_apart, senders))


class _Work:
    """Tensors and numbers that the kernels of one selection share.

    Args:
        buffer: of the whole bucket, changed in place.
        selection: which elements are sent.
        pending: of the engine, or None: the buffer holds what is compressed, and keeps what is
            not sent.
    """

    def __init__(self, buffer: Tensor, selection: Selection, pending: Pending | None) -> None:
        self.buffer, self.selection, self.pending = buffer, selection, pending
        self.pieces, self.table, self.most = selection.on(buffer.device)
        self.parts, self.count = len(selection.rows), self.pieces.shape[1]
        adds = pending is not None and pending.grad is not None
        self.sampled = selection.rule == "sampled"
        self.guarded, self.add, self.keep = pending is not None, adds, adds or pending is None
        sizes = [ALIGNMENT // 4]  # a message: the number of elements in all, and the flag
        if selection.rule in ("sampled", "reaching"):
            sizes += [self.parts]
        if selection.rule in ("sampled", "largest"):
            sizes += [self.parts * size for size in (FIRST, BINS, BINS, CORRECTIONS + 1)]
        words = sum(sizes)
        zeros = buffer.new_zeros(words, dtype=torch.int32) if pending is None else None
        work = pending.work.take(words) if zeros is None and pending else zeros
        assert work is not None
        self.head, *rest = work.split(sizes)
        fixed = selection.rule in ("largest", "chunks")
        self.numbers = self.table[3] if fixed else rest.pop(0)
        self.histograms = rest
        self.limits, self.larger, self.equal = buffer.new_empty(
            2 * (self.parts + self.count), dtype=torch.int32
        ).split([2 * self.parts, self.count, self.count])
        self.flag = self.peaks = buffer
        self.announced = packed(self.head.view(torch.uint8), [(torch.int32, 1)])
        if pending is not None:
            self.flag, self.peaks = pending.flag, pending.peaks
            flag = [(torch.float32, 1)] if pending.flagged else []
            self.announced = packed(self.head.view(torch.uint8), [(torch.int32, 1), *flag])
        self.sent_flag = self.head[1:2].view(torch.float32)

    @property
    def addition(self) -> tuple[Tensor, Tensor, float, float, Tensor]:
        """The buffer, the gradient to add and its weights, and the peaks."""
        return given(self.buffer, self.pending)

    @property
    def places(self) -> tuple[Tensor, int, Tensor, int]:
        """The pieces and the table, and how many there are of each."""
        return self.pieces, self.count, self.table, self.parts


def _count(work: _Work, step: int) -> None:
    """Find the limit of each part, and how many elements of each piece reach it."""
    guarded, grid = {"GUARDED": work.guarded, "ROW": ROW}, (work.count,)
    ends = work.limits, work.larger, work.equal, work.numbers, work.head, work.flag, work.sent_flag
    if work.selection.rule == "reaching":
        launch(count_reaching, grid, *work.addition, *work.places, *ends, ADD=work.add, **guarded)
        return
    first, second, third, reached = work.histograms
    thresholds = work.buffer
    if work.sampled:
        thresholds = work.buffer.new_empty(work.parts)
        launch(
            sample_thresholds,
            (work.parts,),
            *(*work.addition, work.table, work.parts, step, thresholds),
            ADD=work.add,
            BINS=BINS,
            **guarded,
        )
    launch(
        first_digit,
        grid,
        *(*work.addition, *work.places, first, thresholds, reached),
        *(FACTOR**i for i in range(1, CORRECTIONS + 1)),
        ADD=work.add,
        GUARDED=work.guarded,
        SAMPLED=work.sampled,
        FIRST=FIRST,
        **WIDE,
    )
    digits = work.buffer.new_empty(4 * work.parts, dtype=torch.int32)
    one, two = digits.split(2 * work.parts)
    read = work.buffer, work.peaks, *work.places
    steps = ((first, second, one, one, False), (second, third, one, two, True))
    for histogram, finer, before, after, is_third in steps:
        launch(
            next_digit,
            grid,
            *(*read, histogram, finer, reached, work.numbers, before, after),
            SAMPLED=work.sampled,
            THIRD=is_third,
            BINS=BINS,
            FIRST=FIRST,
            **guarded,
        )
    launch(
        count_pieces,
        grid,
        *(*read, third, two, *ends),
        SAMPLED=work.sampled,
        BINS=BINS,
        **guarded,
    )


def _move(
    work: _Work, values: Tensor, coded: Tensor, payload: Packed, flag: tuple[Tensor, Tensor]
) -> Tensor:
    """Fill values, coded positions and the payload's end, and return the positions, int32."""
    number, numel, device = values.numel(), work.buffer.numel(), work.buffer.device
    positions = torch.empty(number, dtype=torch.int32, device=device)
    low, map_at = elias_fano.layout(number, numel)
    bitmap, bfloat = coded[map_at:], values.dtype == torch.bfloat16
    ending = *flag, payload.padding, payload.layout.padding
    kind = {"KEEP": work.keep, "GUARDED": work.guarded}
    if work.selection.rule == "chunks":
        tiles, rows, width = work.selection.tiles(device)
        launch(
            take_chunks,
            (tiles.shape[1],),
            *(*work.addition, tiles, tiles.shape[1], work.table, work.parts, values, positions),
            *(bitmap, triton.cdiv(bitmap.numel(), tiles.shape[1]), bitmap.numel(), *ending),
            ADD=work.add,
            **kind,
            ROWS=rows,
            WIDTH=width,
            ROW=ROW,
            num_warps=8 if width > TILE else 4,
        )
    else:
        seal = payload.layout.seal
        launch(
            move_chosen,
            (work.count,),
            *(work.buffer, work.peaks, *work.places, work.limits, work.numbers),
            *(work.larger, work.equal, values.view(torch.int16) if bfloat else values, positions),
            *(number, bitmap, triton.cdiv(bitmap.numel(), work.count), bitmap.numel(), *ending),
            *(work.head if seal is None else payload.seal.view(torch.int32), _low_word(seal)),
            **kind,
            BFLOAT=bfloat,
            SEALED=seal is not None,
            FOLD=FOLD,
            ROW=ROW,
        )
    if number:
        grid = (triton.cdiv(number, 8 * GROUPS),)
        bits = positions, coded, map_at, coded.numel(), number, low
        launch(code_positions, grid, *bits, GROUPS=GROUPS)
    return positions


def _low_word(seal: int | None) -> int:
    """Return the low half of a seal as a signed number."""
    word = (seal or 0) & 0xFFFFFFFF
    return word - (word >> 31 << 32)


def encode(
    buffer: Tensor, selection: Selection, dtype: torch.dtype, pending: Pending | None
) -> Packed:
    """Return the payload (values, coded positions) of the k largest elements of each part.

    Args:
        buffer: of the whole bucket; the unsent part remains, as ``core.segments.Pending`` says.
        selection: of the rule ``"largest"`` or ``"chunks"``.
        dtype: of the values, float32 or bfloat16; for ``"chunks"`` float32.
        pending: the engine's work, or None.
    """
    number = selection.most
    fields = [(dtype, number), (torch.uint8, elias_fano.coded_bytes(number, buffer.numel()))]
    payload = pending.reserve(fields) if pending else reserve(fields, buffer.device)
    take(buffer, selection, payload[0], payload[1], payload, pending)
    return payload.first(2)


def take(
    buffer: Tensor,
    selection: Selection,
    values: Tensor,
    coded: Tensor,
    payload: Packed,
    pending: Pending | None,
) -> Tensor:
    """Move the elements to send out of ``buffer``, and return their positions, ``(k,)`` int32.

    Args:
        buffer: of the whole bucket; the unsent part remains, as ``core.segments.Pending`` says.
        selection: of the rule ``"largest"`` or ``"chunks"``.
        values: ``(k,)`` float32 or bfloat16; overwritten.
        coded: of the coded positions; overwritten.
        payload: its flag and padding are written.
        pending: the engine's work, or None.
    """
    work = _Work(buffer, selection, pending)
    if selection.rule == "largest":
        _count(work, 0)
    flagged = pending is not None and pending.flagged
    flag = (work.flag, payload.flag if flagged else work.sent_flag)
    return _move(work, values, coded, payload, flag)


def move(
    buffer: Tensor, selection: Selection, dtype: torch.dtype, step: int
) -> tuple[Tensor, Tensor]:
    """Move the elements to send out of ``buffer``: ascending positions, int64, and values.

    Values have ``dtype``, and ``step`` moves the sample. The host waits for the number of elements
    if it is not fixed.
    """
    work = _Work(buffer, selection, None)
    if selection.rule != "chunks":
        _count(work, step)
    number = selection.most if selection.rule in ("largest", "chunks") else int(work.head[0])
    fields = [(dtype, number), (torch.uint8, elias_fano.coded_bytes(number, buffer.numel()))]
    payload = reserve(fields, buffer.device)
    values, coded = payload
    positions = _move(work, values, coded, payload, (work.flag, work.sent_flag))
    return positions.long(), values


def code(positions: Tensor, numel: int) -> Tensor:
    """Return ``elias_fano.encode(positions, numel)``."""
    chosen = positions.numel()
    nbytes = elias_fano.coded_bytes(chosen, numel)
    coded = torch.zeros(nbytes, dtype=torch.uint8, device=positions.device)
    if chosen:
        low, map_at = elias_fano.layout(chosen, numel)
        grid = (triton.cdiv(chosen, 8 * GROUPS),)
        bits = positions.int(), coded, map_at, nbytes, chosen, low
        launch(code_positions, grid, *bits, GROUPS=GROUPS)
    return coded


def places(coded: Tensor, chosen: int, numel: int) -> tuple[Tensor, Tensor]:
    """Return the coded positions, ``(chosen,)`` int64 below ``numel``, and ``(1,)`` bool.

    The second is True if the positions were out of range, did not ascend, or were not ``chosen``.

    Args:
        coded: ``(coded_bytes(chosen, numel),)`` uint8.
        chosen: k, at least 1.
        numel: n.
    """
    tiles = triton.cdiv(elias_fano.map_bits(chosen, numel), TILE)
    zeros = torch.zeros(chosen, dtype=torch.int32, device=coded.device)
    count = torch.full((1,), chosen, dtype=torch.int32, device=coded.device)
    found, wrong = zeros.new_empty(tiles + 1).split([tiles, 1])
    read = (coded, 0, 0, count, 0, numel, tiles, found, wrong)
    launch(count_bits, (tiles, 1), *read, TILE=TILE, ROW=ROW)
    launch(find_places, (tiles, 1), *read, zeros, chosen, TILE=TILE, FOLD=FOLD, ROW=ROW)
    return zeros.long().clamp_(max=numel - 1), wrong != 0


@dataclass(frozen=True, eq=False)
class Counted:
    """Elements that have been counted on the device and not been moved yet.

    Attributes:
        number: the payload (number of elements,), int32. It carries the guard's flag if that is
            asked for.
    """

    number: Packed
    _work: _Work
    _dtype: torch.dtype

    def encode(self, lengths: Sequence[tuple[int, int]], worker: int) -> Packed:
        """Return the payload (values, coded positions), in a message as long as the longest.

        Args:
            lengths: of the payloads of all workers.
            worker: this worker.
        """
        dtypes, device = (self._dtype, torch.uint8), self._work.buffer.device
        layouts = [Message(dtypes, [(n,) for n in each], each) for each in lengths]
        own, longest = lengths[worker], max(layout.nbytes for layout in layouts)
        fields = list(zip(dtypes, own, strict=True))
        payload = reserve(fields, device, sealed=own, nbytes=longest)
        values, coded = payload
        _move(self._work, values, coded, payload, (self._work.flag, self._work.sent_flag))
        return payload


def count(
    buffer: Tensor, selection: Selection, dtype: torch.dtype, step: int, pending: Pending
) -> Counted:
    """Count the elements to send, of the rules ``"sampled"`` and ``"reaching"``.

    Values have ``dtype``, and ``step`` moves the sample. The host does not wait.
    """
    work = _Work(buffer, selection, pending)
    _count(work, step)
    return Counted(work.announced.first(1), work, dtype)


def average(
    payloads: Sequence[Sequence[Tensor]],
    counts: Tensor | None,
    out: Tensor,
    selection: Selection,
    pending: Pending,
) -> None:
    """Write the mean of all workers' payloads (values, coded positions) to the parts of ``out``.

    All elements become NaN if positions do not ascend, are out of range or not as many as values.

    Args:
        payloads: of all workers, with lengths that fit the numbers of elements.
        counts: all workers' numbers of elements on the device, ``(W,)`` int32; None if all are
            ``selection.most``.
        out: of the whole bucket.
        selection: has the places of the parts.
        pending: the engine's work.
    """
    pieces, table, most = selection.on(out.device)
    numbers = [payload[0].numel() for payload in payloads]
    values, apart, _ = _rows([payload[0] for payload in payloads], numbers, 0)
    width = values.element_size()
    coded, coded_apart, slope = _rows([payload[1] for payload in payloads], numbers, width)
    workers, numel, longest = len(payloads), out.numel(), max(numbers)
    length = max(elias_fano.map_bits(number, numel) for number in numbers)
    tiles = max(1, triton.cdiv(length, TILE))
    found, wrong, positions = out.new_empty(
        workers * (tiles + 1 + longest), dtype=torch.int32
    ).split([workers * tiles, workers, workers * longest])
    counted = (most, 0) if counts is None else (counts, 1)
    read = (coded, coded_apart, slope, *counted, numel, tiles, found, wrong)
    launch(count_bits, (tiles, workers), *read, TILE=TILE, ROW=ROW)
    launch(
        find_places,
        (tiles, workers),
        *(*read, positions, longest),
        TILE=TILE,
        FOLD=FOLD,
        ROW=ROW,
    )
    flags, flags_apart = evenly(pending.flags)
    bfloat = values.dtype == torch.bfloat16
    launch(
        add_all,
        (pieces.shape[1],),
        *(values.view(torch.int16) if bfloat else values, apart, *counted),
        *(positions, longest, wrong, workers, 1 / workers, out),
        *(flags, flags_apart, len(pending.flags), pending.segments.starts),
        *(pieces, pieces.shape[1], table, len(selection.rows)),
        BFLOAT=bfloat,
        ROW=ROW,
    )


def _rows(tensors: Sequence[Tensor], numbers: Sequence[int], slope: int) -> tuple[Tensor, int, int]:
    """Return the first tensor, and how far from it the others are, in elements.

    Tensor w is at ``apart·w + slope·(numbers[w] − numbers[0])``, as in messages that have arrived
    together. Others are copied, and the slope is 0.
    """
    first = tensors[0]
    if len(set(numbers)) == 1:
        return *evenly(tensors), 0
    width, addresses = first.element_size(), [tensor.data_ptr() for tensor in tensors]
    places = [
        address - width * slope * (number - numbers[0])
        for address, number in zip(addresses, numbers, strict=True)
    ]
    apart, rest = divmod(places[1] - places[0], width)
    together = all(place == places[0] + apart * width * w for w, place in enumerate(places))
    same = len({storage_of(tensor) for tensor in tensors}) == 1
    if together and same and not rest and all(numbers):  # an empty tensor has no address
        return first, apart, slope
    padded = torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
    return padded, padded.shape[1], 0


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    x = 0.5 * numbers + numbers.flip(0)
    rows = [Row(0, 0, 500, 25, 3, 8, 20, 0x3E800000), Row(1, 500, 1000, 25, 3, 8, 20, 0x3E800000)]
    limit = x[1:500:3].abs().sort(descending=True).values[7]
    largest = x[:500].abs().sort(descending=True).values[24]
    few = torch.arange(500, 525, device=numbers.device)  # of the idle parameter the first
    for rule, reach in (("largest", largest), ("sampled", limit), ("reaching", 0.25)):
        chosen = (x[:500].abs() >= reach).nonzero().view(-1)
        chosen = torch.cat([chosen, few]) if rule == "largest" else chosen[:500]
        selection = Selection(rule, tuple(rows))  # type: ignore[arg-type]
        pending, left, out = sample(numbers), numbers.clone(), numbers.clone()
        if rule == "largest":
            payload = encode(left, selection, torch.bfloat16, pending)
            counts = None
        else:
            counted = count(left, selection, torch.float32, 1, pending)
            yield counted.number[0].long(), counted.number[0].new_full((1,), len(chosen)).long()
            lengths = (len(chosen), elias_fano.coded_bytes(len(chosen), 1000))
            payload, counts = counted.encode([lengths], 0), counted.number[0].repeat(2)
        sent = torch.where(torch.arange(1000, device=x.device) < 500, x, 0.0)[chosen]
        sent = sent.to(payload[0].dtype).float()
        yield payload[0].float(), sent
        yield payload[1].float(), elias_fano.encode(chosen, 1000).float()
        yield left, x.index_add(0, chosen, sent, alpha=-1)
        average([payload, payload], counts, out, selection, pending)
        yield out, torch.zeros_like(x).index_add(0, chosen, sent)


ATTEMPTS = {"sparse": _attempt}
