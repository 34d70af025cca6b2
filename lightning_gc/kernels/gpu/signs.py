"""Triton kernels that send a bit per element of a bucket and the means of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import pack
from lightning_gc.core.message import Packed, evenly
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch
from lightning_gc.kernels.gpu.segments import arrived, compensated, sample
from lightning_gc.kernels.signs import LANES, SUMS, mean, table_of

GROUPS = 128
"""Groups of eight elements that a program reads at a time."""


@triton.jit
def in_pairs(x, LEVELS: tl.constexpr):
    """Return the sum of ``(2 ** LEVELS,)``: of neighbours, again and again."""
    for _ in tl.static_range(LEVELS - 1):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def mean_of(sums, first, pieces, share, SUMS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the sum of a parameter's ``pieces`` sums times ``share``."""
    total = tl.zeros([SUMS], tl.float32)
    at = 0
    while at < pieces:
        lane = at + tl.arange(0, SUMS)
        total += tl.load(sums + first + lane, mask=lane < pieces, other=0.0) * share
        at += SUMS
    return in_pairs(total, LEVELS)


@kernel()
def sum_pieces(
    buffer,
    grad,
    decay,
    gain,
    table,
    count,
    sums,
    negatives,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Add a piece's magnitudes; with SPLIT its elements below 0 and the others, and count them."""
    piece = tl.program_id(0)
    at = tl.load(table + count + piece)
    stop = tl.load(table + 2 * count + piece)
    above = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    fewer = tl.zeros([LANES], tl.int32)
    while at < stop:
        here = at + tl.arange(0, LANES)
        x = compensated(buffer, grad, here, here < stop, decay, gain, ADD)
        if SPLIT:
            below += tl.where(x > 0, 0.0, x)  # NaN in both
            above += tl.where(x < 0, 0.0, x)
            fewer += tl.where(x < 0, 1, 0)
        else:
            above += tl.abs(x)
        at += LANES
    tl.store(sums + piece, in_pairs(above, LEVELS))
    if SPLIT:
        tl.store(sums + count + piece, in_pairs(below, LEVELS))
        tl.store(negatives + piece, tl.sum(fewer, axis=0))


@kernel()
def take_signs(
    buffer,
    grad,
    decay,
    gain,
    peaks,
    table,
    count,
    sums,
    negatives,
    signs,
    means,
    flag,
    sent_flag,
    padding,
    length,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    SUMS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Write a piece's signs, its parameter's means, and leave the difference."""
    piece = tl.program_id(0)
    if piece == 0:
        end_message(flag, sent_flag, padding, length)
    idle = tl.load(peaks + tl.load(table + piece)) == 0.0
    begin = tl.load(table + count + piece)
    stop = tl.load(table + 2 * count + piece)
    bytes_of = signs + tl.load(table + 3 * count + piece)
    part = tl.load(table + 4 * count + piece)
    first = tl.load(table + 5 * count + piece)
    pieces = tl.load(table + 6 * count + piece)
    numel = tl.load(table + 7 * count + piece)
    if SPLIT:
        fewer = 0
        at = 0
        while at < pieces:
            fewer += tl.load(negatives + first + at)
            at += 1
        some = tl.maximum(fewer, 1).to(tl.float32)
        below = mean_of(sums + count, first, pieces, tl.div_rn(1.0, some), SUMS, LEVELS)
        numel -= fewer
    others = tl.maximum(numel, 1).to(tl.float32)
    above = mean_of(sums, first, pieces, tl.div_rn(1.0, others), SUMS, LEVELS)
    if SPLIT == 0:
        below = -above
    if ADD:
        above = tl.where(idle, 0.0, above)
        below = tl.where(idle, 0.0, below)
    if piece == first:
        if SPLIT:
            tl.store(means + 2 * part, below)
            tl.store(means + 2 * part + 1, above)
        else:
            tl.store(means + part, above)
    lane = tl.arange(0, 8)[None, :]
    at = begin
    while at < stop:
        groups = at + 8 * tl.arange(0, GROUPS)
        here = groups[:, None] + lane  # (GROUPS, 8)
        inside = here < stop
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        positive = tl.where(x >= 0, 1, 0)  # not NaN
        if ADD:
            positive = tl.where(idle, 1, positive)
            left = x - tl.where(positive == 1, above, below)
            left = tl.where(idle, x, left)
            tl.store(buffer + here, tl.where(is_finite(left), left, 0.0), mask=inside)
        marks = tl.sum(tl.where(inside, positive, 0) << lane, axis=1)
        tl.store(bytes_of + (groups - begin) // 8, marks.to(tl.uint8), mask=groups < stop)
        at += 8 * GROUPS


@kernel()
def average_signs(
    signs,
    apart,
    means,
    means_apart,
    workers,
    share,
    out,
    flags,
    flags_apart,
    senders,
    starts,
    table,
    count,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write a piece of the mean: all workers' levels, in their order."""
    piece = tl.program_id(0)
    first = tl.load(starts + tl.load(table + piece))
    begin = tl.load(table + count + piece)
    stop = tl.load(table + 2 * count + piece)
    byte = tl.load(table + 3 * count + piece)
    part = tl.load(table + 4 * count + piece)
    bad = arrived(flags, flags_apart, senders)
    weight = tl.zeros([GROUPS, 8], tl.float32) + share
    lane = tl.arange(0, 8)[None, :]
    at = begin
    while at < stop:
        groups = at + 8 * tl.arange(0, GROUPS)
        here = groups[:, None] + lane  # (GROUPS, 8)
        total = tl.zeros([GROUPS, 8], tl.float32)
        sender = 0
        while sender < workers:
            place = signs + sender * apart.to(tl.int64) + byte + (groups - begin) // 8
            marks = tl.load(place, mask=groups < stop, other=0).to(tl.int32)
            own = means + sender * means_apart.to(tl.int64)
            if SPLIT:
                below = tl.load(own + 2 * part)
                above = tl.load(own + 2 * part + 1)
            else:
                above = tl.load(own + part)
                below = -above
            level = tl.where(((marks[:, None] >> lane) & 1) == 1, above, below)
            total = tl.fma(level, weight, total)  # as torch adds with a factor
            sender += 1
        total = tl.where(here == first, total + bad, total)
        tl.store(out + here, total, mask=here < stop)
        at += 8 * GROUPS


def encode(
    buffer: Tensor, table: Tensor, nbytes: int, means: int, split: bool, pending: Pending
) -> Packed:
    """Return the payload (signs, means), as ``core.segments.Pending`` says.

    Args:
        buffer: of the whole bucket, changed in place.
        table: as ``kernels.signs.table_of`` returns it.
        nbytes: of the signs.
        means: number of means.
        split: send two means per parameter, of elements below 0 and of the others; not split, one
            mean magnitude.
        pending: the engine's work.
    """
    packed = pending.reserve([(torch.uint8, nbytes), (torch.float32, means)])
    count = table.shape[1]
    sums = buffer.new_empty(2 * count if split else count)
    negatives = table.new_empty(count if split else 1)
    grad = buffer if pending.grad is None else pending.grad
    own = buffer, grad, pending.decay, pending.gain
    kind = {"ADD": pending.grad is not None, "SPLIT": split}
    launch(
        sum_pieces,
        (count,),
        *(*own, table, count, sums, negatives),
        **kind,
        LANES=LANES,
        LEVELS=LANES.bit_length() - 1,
    )
    launch(
        take_signs,
        (count,),
        *(*own, pending.peaks, table, count, sums, negatives),
        *(packed[0], packed[1], *pending.ending(packed)),
        **kind,
        GROUPS=GROUPS,
        SUMS=SUMS,
        LEVELS=SUMS.bit_length() - 1,
    )
    return packed.first(2)


def average(
    payloads: Sequence[Sequence[Tensor]], out: Tensor, table: Tensor, split: bool, pending: Pending
) -> None:
    """Write the mean of all workers' payloads to the parameters of ``table`` in ``out``."""
    signs, apart = evenly([payload[0] for payload in payloads])
    means, means_apart = evenly([payload[1] for payload in payloads])
    flags, flags_apart = evenly(pending.flags)
    launch(
        average_signs,
        (table.shape[1],),
        *(signs, apart, means, means_apart, len(payloads), 1 / len(payloads), out),
        *(flags, flags_apart, len(pending.flags), pending.segments.starts),
        *(table, table.shape[1]),
        SPLIT=split,
        GROUPS=GROUPS,
    )


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    table = table_of([(0, 0, 500), (1, 500, 1000)], numbers.device)
    grad = numbers.roll(250)
    x = 0.5 * numbers + grad
    used, negative = x[:500], x[:500] < 0
    magnitude, fewer = mean(used.abs(), 500), negative.sum()
    below = mean(used.where(negative, 0.0), fewer)
    above = mean(used.where(~negative, 0.0), 500 - fewer)
    bits = torch.cat([~negative, torch.ones_like(negative)]).to(torch.uint8)
    for split, levels in ((False, [-magnitude, magnitude]), (True, [below, above])):
        pending, left, out = replace(sample(numbers), grad=grad), numbers.clone(), numbers.clone()
        signs, means = encode(left, table, 126, 4 if split else 2, split, pending)
        sent = torch.cat([torch.where(negative, levels[0], levels[1]), torch.zeros_like(x[500:])])
        yield signs, torch.cat([pack(part, 1) for part in bits.split(500)])
        yield means, torch.stack([*levels[-1 - split :], *torch.zeros_like(means[: 1 + split])])
        yield left, x - sent
        average([(signs, means)] * 2, out, table, split, pending)
        yield out, sent


ATTEMPTS = {"signs": _attempt}
