"""Triton kernels that select elements of a whole bucket and move them out of it.

A magnitude is ordered like its 31 bits. The k-th largest of each part is found by histograms of
the first 9 bits, of the next 11 among those with the same first bits, and of the last 11. All
parts are read at once, and no number is read on the host.

Few elements share the first bits, so the GPU's memory counts them. A program counts all of the
first digits itself, which takes time in proportion to their values.

Reference:
    Alabi et al., "Fast k-Selection Algorithms for Graphics Processing Units", JEA 2012.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.message import ALIGNMENT, Packed, packed
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.casts import from_half, to_half
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.positions import FOLD, sum_of
from lightning_gc.kernels.gpu.segments import ROW, compensated, given, piece_of
from lightning_gc.kernels.sparse import CORRECTIONS, FACTOR, Selection

FIRST, BINS = 512, 2048
"""Values of the first 9 bits of a magnitude, and of the next 11 and the last 11."""
WIDE = {"ROW": 4096, "num_warps": 8}
"""A program's elements at a time where it counts all of them."""
_LARGE = 4096
"""Elements of a chunk above which a program has more warps."""


@triton.jit
def field(table, part, index):
    """Return a number of a part, in the order of ``kernels.sparse.Row``.

    8: its first piece; 9: the number of elements sent of the parts before.
    """
    return tl.load(table + 10 * part + index)


@triton.jit
def is_idle(peaks, table, part, GUARDED: tl.constexpr):
    """Return whether zeros are sent for a part, because its gradient is zero."""
    idle = part < 0
    if GUARDED:
        idle = tl.load(peaks + field(table, part, 0)) == 0.0
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
def lowered(threshold, factor):
    """Return the bits of the threshold times ``factor``; all but zeros reach it, all reach NaN."""
    bits = magnitude_bits(tl.load(threshold) * factor)
    return tl.where(bits > 0x7F800000, 0, tl.maximum(bits, 1))


@triton.jit
def clear(bitmap, program, size, length, ROW: tl.constexpr):
    """Zero a program's ``size`` of a bitmap's ``length`` bytes."""
    byte = program * size
    end = tl.minimum(byte + size, length)
    while byte < end:
        each = byte + tl.arange(0, ROW)
        tl.store(bitmap + each, tl.zeros([ROW], tl.uint8), mask=each < end)
        byte += ROW


@kernel()
def sample_thresholds(
    buffer, grad, decay, gain, peaks,
    table, step,
    thresholds,
    ADD: tl.constexpr, GUARDED: tl.constexpr, BINS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Find the magnitude of the wanted rank in the sample of each part; one program a part."""
    part = tl.program_id(0)
    apart = field(table, part, 4)
    wanted = field(table, part, 5)
    begin = field(table, part, 1) + step % apart
    size = (field(table, part, 2) - begin + apart - 1) // apart
    idle = is_idle(peaks, table, part, GUARDED)
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
    buffer, grad, decay, gain, peaks,
    pieces, table,
    histogram, thresholds, reached,
    factor1, factor2, factor3, factor4,
    ADD: tl.constexpr, GUARDED: tl.constexpr, SAMPLED: tl.constexpr, FIRST: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Add the gradient, and count the first digits and how many reach each threshold."""
    part, at, stop, _ = piece_of(pieces, tl.program_id(0))
    idle = is_idle(peaks, table, part, GUARDED)
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
        tl.atomic_add(reached + 5 * part, tl.sum(reach0, axis=0))
        tl.atomic_add(reached + 5 * part + 1, tl.sum(reach1, axis=0))
        tl.atomic_add(reached + 5 * part + 2, tl.sum(reach2, axis=0))
        tl.atomic_add(reached + 5 * part + 3, tl.sum(reach3, axis=0))
        tl.atomic_add(reached + 5 * part + 4, tl.sum(reach4, axis=0))


@kernel()
def next_digit(
    buffer, peaks,
    pieces, table,
    histogram, finer, reached, numbers,
    before, after,
    GUARDED: tl.constexpr, SAMPLED: tl.constexpr, THIRD: tl.constexpr, BINS: tl.constexpr,
    FIRST: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Count the next digits of elements that share the digits of the k-th largest so far.

    ``before`` and ``after`` hold these digits, and which of the elements that share them is the
    k-th. All programs of a part store the same.
    """
    part, at, stop, _ = piece_of(pieces, tl.program_id(0))
    idle = is_idle(peaks, table, part, GUARDED)
    if THIRD:
        counts = tl.load(histogram + part * BINS + tl.arange(0, BINS))
        wanted = tl.load(before + 2 * part + 1)
        digit, left = digit_of(counts, wanted, BINS)
        prefix = (tl.load(before + 2 * part) << 11) | digit
    else:
        counts = tl.load(histogram + part * FIRST + tl.arange(0, FIRST))
        wanted = field(table, part, 3)
        if SAMPLED:
            least = field(table, part, 6)
            found = tl.load(reached + 5 * part)
            for level in tl.static_range(1, 5):
                more = tl.load(reached + 5 * part + level)
                found = tl.where(found < least, more, found)
            wanted = tl.minimum(wanted, found)
            tl.store(numbers + part, wanted)
        prefix, left = digit_of(counts, wanted, FIRST)
        if SAMPLED:
            prefix = tl.where(wanted > 0, prefix, FIRST)  # none has it, and none is sent
    tl.store(after + 2 * part, prefix)
    tl.store(after + 2 * part + 1, left)
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
    buffer, peaks,
    pieces, table,
    histogram, before,
    limits, larger, equal, numbers, total,
    flag, sent_flag,
    GUARDED: tl.constexpr, SAMPLED: tl.constexpr, BINS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Count elements above the k-th largest and equal to it; store it, and how many are needed."""
    piece = tl.program_id(0)
    part, at, stop, _ = piece_of(pieces, piece)
    idle = is_idle(peaks, table, part, GUARDED)
    counts = tl.load(histogram + part * BINS + tl.arange(0, BINS))
    digit, needed = digit_of(counts, tl.load(before + 2 * part + 1), BINS)
    limit = (tl.load(before + 2 * part) << 11) | digit
    if SAMPLED:
        number = tl.load(numbers + part)
        limit = tl.where(number > 0, limit, 0x7FFFFFFF)
        needed = tl.where(number > 0, needed, 0)
        if at == field(table, part, 1):
            tl.atomic_add(total, number)
        if piece == 0:
            tl.store(sent_flag, tl.load(flag))
    tl.store(limits + 2 * part, limit)
    tl.store(limits + 2 * part + 1, needed)
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
    buffer, grad, decay, gain, peaks,
    pieces, table,
    limits, larger, equal, numbers, total,
    flag, sent_flag,
    ADD: tl.constexpr, GUARDED: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Add the gradient, and count elements that reach their part's limit."""
    piece = tl.program_id(0)
    part, at, stop, _ = piece_of(pieces, piece)
    idle = is_idle(peaks, table, part, GUARDED)
    if piece == 0:
        tl.store(sent_flag, tl.load(flag))
    limit = field(table, part, 7) - 1
    tl.store(limits + 2 * part, limit)
    tl.store(limits + 2 * part + 1, 0)
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
    buffer, peaks,
    pieces, table,
    limits, numbers, larger, equal,
    values, positions, number,
    bitmap, zeroed, length,
    flag, sent_flag, padding, padded,
    seal_place, seal,
    KEEP: tl.constexpr, GUARDED: tl.constexpr, BFLOAT: tl.constexpr, SEALED: tl.constexpr,
    FOLD: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Move what is sent out of the buffer, ascending; of equal magnitudes the first are sent.

    Also zero ``zeroed`` bytes of the bitmap, and write the end of the message.
    """
    piece = tl.program_id(0)
    if piece == 0:
        end_message(flag, sent_flag, padding, padded)
        if SEALED:
            tl.store(seal_place, seal)
            tl.store(seal_place + 1, -1)  # a seal is negative
    clear(bitmap, piece, zeroed, length, ROW)
    part, at, stop, _ = piece_of(pieces, piece)
    idle = is_idle(peaks, table, part, GUARDED)
    limit = tl.load(limits + 2 * part)
    needed = tl.load(limits + 2 * part + 1)
    first = field(table, part, 8)
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
    buffer, grad, decay, gain, peaks,
    tiles, table,
    values, positions,
    bitmap, zeroed, length,
    flag, sent_flag, padding, padded,
    ADD: tl.constexpr, KEEP: tl.constexpr, GUARDED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Add the gradient, and move the largest of each of ROWS chunks out of the buffer.

    Also zero ``zeroed`` bytes of the bitmap, and write the end of the message.
    """
    tile = tl.program_id(0)
    if tile == 0:
        end_message(flag, sent_flag, padding, padded)
    clear(bitmap, tile, zeroed, length, ROW)
    part = tl.load(tiles + 2 * tile)
    chunk = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    stop = field(table, part, 2)
    size = field(table, part, 4)
    number = field(table, part, 5)
    idle = is_idle(peaks, table, part, GUARDED)
    begin = field(table, part, 1) + chunk * size
    wanted = tl.where(begin + size <= stop, number, field(table, part, 6))
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
    first = field(table, part, 9) + chunk * number
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


class Source:
    """A bucket and what is selected in it, as kernels read them.

    Args:
        buffer: of the whole bucket, changed in place.
        selection: which elements are sent.
        pending: of the engine, or None: the buffer holds what is compressed, and keeps what is
            not sent.
    """

    def __init__(self, buffer: Tensor, selection: Selection, pending: Pending | None) -> None:
        self.buffer, self.selection, self.pending = buffer, selection, pending
        self.pieces, self.table, self.numbers, _ = selection.on(buffer.device)
        self.parts, self.count = len(selection.rows), len(self.pieces)
        self.add = pending is not None and pending.grad is not None
        self.kind = {"GUARDED": pending is not None, "ROW": ROW}

    @property
    def addition(self) -> tuple[Tensor, Tensor, float, float, Tensor]:
        """The buffer, the gradient to add and its weights, and the peaks."""
        return given(self.buffer, self.pending)


class Counts:
    """Numbers of elements that kernels count, and the message that announces them.

    Args:
        source: of the elements.

    Attributes:
        announced: the payload (number of elements in all,), int32, and the guard's flag.
        flag, sent_flag: the guard's flag, and its place in this message.
    """

    def __init__(self, source: Source) -> None:
        buffer, pending, rule = source.buffer, source.pending, source.selection.rule
        sizes = [ALIGNMENT // 4]  # the message
        if rule in ("sampled", "reaching"):
            sizes += [source.parts]
        if rule in ("sampled", "largest"):
            sizes += [source.parts * size for size in (FIRST, BINS, BINS, CORRECTIONS + 1)]
        if pending is None:
            work, flags = buffer.new_zeros(sum(sizes), dtype=torch.int32), 0
        else:
            work, flags = pending.work.take(sum(sizes)), int(pending.flagged)
        self.head, *rest = work.split(sizes)
        self.numbers = source.numbers if rule in ("largest", "chunks") else rest.pop(0)
        self.histograms = rest
        self.limits, self.larger, self.equal = buffer.new_empty(
            2 * (source.parts + source.count), dtype=torch.int32
        ).split([2 * source.parts, source.count, source.count])
        fields = [(torch.int32, 1), *[(torch.float32, 1)] * flags]
        self.announced = packed(self.head.view(torch.uint8), fields)
        self.flag = buffer if pending is None else pending.flag
        self.sent_flag = self.head[1:2].view(torch.float32)


def count(source: Source, step: int) -> Counts:
    """Find the limit of each part, and count the elements of each piece that reach it."""
    counts, grid, kind = Counts(source), (source.count,), source.kind
    rule, add = source.selection.rule, {"ADD": source.add}
    if rule == "chunks":  # their numbers are fixed
        return counts
    places = source.pieces, source.table
    found = counts.limits, counts.larger, counts.equal, counts.numbers
    ends = *found, counts.head, counts.flag, counts.sent_flag
    if rule == "reaching":
        launch(count_reaching, grid, *source.addition, *places, *ends, **add, **kind)
        return counts
    first, second, third, reached = counts.histograms
    thresholds, sampled = source.buffer, {"SAMPLED": rule == "sampled"}
    if rule == "sampled":
        thresholds = source.buffer.new_empty(source.parts)
        read = *source.addition, source.table
        launch(
            sample_thresholds, (source.parts,), *read, step, thresholds, **add, BINS=BINS, **kind
        )
    launch(
        first_digit,
        grid,
        *(*source.addition, *places, first, thresholds, reached),
        *(FACTOR**i for i in range(1, CORRECTIONS + 1)),
        **(add | kind | sampled | WIDE),
        FIRST=FIRST,
    )
    digits = source.buffer.new_empty(4 * source.parts, dtype=torch.int32)
    one, two = digits.split(2 * source.parts)
    bucket, *_, peaks = source.addition
    kind = kind | sampled | {"BINS": BINS}
    steps = ((first, second, one, one, False), (second, third, one, two, True))
    for histogram, finer, before, after, is_third in steps:
        launch(
            next_digit,
            grid,
            *(bucket, peaks, *places, histogram, finer, reached, counts.numbers),
            *(before, after),
            **kind,
            THIRD=is_third,
            FIRST=FIRST,
        )
    launch(count_pieces, grid, bucket, peaks, *places, third, two, *ends, **kind)
    return counts


def move(
    source: Source, counts: Counts, values: Tensor, bitmap: Tensor, payload: Packed, flag: Tensor
) -> Tensor:
    """Move the elements to send out of the buffer, and return their positions, ``(k,)`` int32.

    Args:
        source: of the elements.
        counts: of the same ``source``.
        values: ``(k,)`` float32 or bfloat16; overwritten.
        bitmap: zeroed.
        payload: its padding and its seal are written.
        flag: the guard's flag is written to it.
    """
    number, device = values.numel(), source.buffer.device
    positions = torch.empty(number, dtype=torch.int32, device=device)
    ending = counts.flag, flag, payload.padding, payload.layout.padding
    kind = source.kind | {"KEEP": source.add or source.pending is None}
    if source.selection.rule == "chunks":
        tiles, rows, width = source.selection.tiles(device)
        launch(
            take_chunks,
            (len(tiles),),
            *(*source.addition, tiles, source.table, values, positions),
            *(bitmap, triton.cdiv(bitmap.numel(), len(tiles)), bitmap.numel(), *ending),
            ADD=source.add,
            **kind,
            ROWS=rows,
            WIDTH=width,
            num_warps=8 if width > _LARGE else 4,
        )
        return positions
    seal, bfloat = payload.layout.seal, values.dtype == torch.bfloat16
    bucket, *_, peaks = source.addition
    launch(
        move_chosen,
        (source.count,),
        *(bucket, peaks, source.pieces, source.table, counts.limits, counts.numbers),
        *(counts.larger, counts.equal, values.view(torch.int16) if bfloat else values, positions),
        *(number, bitmap, triton.cdiv(bitmap.numel(), source.count), bitmap.numel(), *ending),
        *(counts.head if seal is None else payload.seal.view(torch.int32), _low_word(seal)),
        **kind,
        BFLOAT=bfloat,
        SEALED=seal is not None,
        FOLD=FOLD,
    )
    return positions


def _low_word(seal: int | None) -> int:
    """Return the low half of a seal as a signed number."""
    word = (seal or 0) & 0xFFFFFFFF
    return word - (word >> 31 << 32)
