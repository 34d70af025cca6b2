"""Triton kernels that send a bit per element of a bucket and the means of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import pack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed, evenly
from lightning_gc.core.segments import PIECE, Pending
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, word
from lightning_gc.kernels.gpu.segments import (
    arrived,
    attempt_shards,
    book,
    compensated,
    ending,
    given,
    reserved,
    sample,
)
from lightning_gc.kernels.signs import (
    LANES,
    SUMS,
    Layout,
    Levels,
    by_torch,
    coins,
    least_of,
    share_of,
)

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


@triton.jit
def count_of(numbers, first, pieces, SUMS: tl.constexpr):
    """Return the sum of a parameter's ``pieces`` numbers."""
    total = tl.zeros([SUMS], tl.int32)
    at = 0
    while at < pieces:
        lane = at + tl.arange(0, SUMS)
        total += tl.load(numbers + first + lane, mask=lane < pieces, other=0)
        at += SUMS
    return tl.sum(total, axis=0)


@triton.jit
def levels_of(
    sums, negatives, count, first, pieces, numel,
    SPLIT: tl.constexpr, VOTE: tl.constexpr, PIECE: tl.constexpr, SUMS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Return what is sent for elements below 0 and for others."""
    if VOTE:
        above = tl.where(mean_of(sums, first, pieces, 1.0, SUMS, LEVELS) > 0, 1.0, 0.0)
        below = -above
    else:
        fewer = 0
        if SPLIT:
            fewer = count_of(negatives, first, pieces, SUMS)
            share = PIECE * tl.div_rn(1.0, tl.maximum(fewer, 1).to(tl.float32))
            below = mean_of(sums + count, first, pieces, share, SUMS, LEVELS)
        share = PIECE * tl.div_rn(1.0, tl.maximum(numel - fewer, 1).to(tl.float32))
        above = mean_of(sums, first, pieces, share, SUMS, LEVELS)
        if SPLIT == 0:
            below = -above
    return below, above


@triton.jit
def coins_of(key, step, places):
    """Return random bits, int32; see ``kernels.signs.coins``."""
    key = key.to(tl.uint64)
    high = (key >> 32).to(tl.uint32) + step.to(tl.uint32) * 0x85EBCA6B
    return (word(key.to(tl.uint32), high, places.to(tl.uint32)) >> 31).to(tl.int32)


PLACE, START, LIMIT, ROW, STOP, BYTE, PART, RANK, PIECES, NUMEL, SHARD, FIRST, KEY = map(
    tl.constexpr, range(13)
)
"""Rows of ``Table.pieces``; ``kernels.segments.table_of`` has the first four, too."""


@triton.jit
def place_of(table, count, piece, MEAN: tl.constexpr):
    """Return a piece's first element, its end, and the end of what is there; zeros follow."""
    begin = tl.load(table + START * count + piece)
    stop = tl.load(table + STOP * count + piece)
    limit = tl.load(table + LIMIT * count + piece)
    if MEAN:
        row = tl.load(table + ROW * count + piece)
        stop += row - begin
        begin = row
        limit = stop
    return begin, stop, limit


@kernel()
def sum_pieces(
    buffer,
    grad,
    decay,
    gain,
    table,
    count,
    least,
    sums,
    negatives,
    ADD: tl.constexpr,
    MEAN: tl.constexpr,
    SPLIT: tl.constexpr,
    VOTE: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Add a piece's magnitudes; with SPLIT its elements below 0 and the others, and count them.

    With VOTE count magnitudes above ``least``.
    """
    piece = tl.program_id(0)
    at, stop, limit = place_of(table, count, piece, MEAN)
    above = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    fewer = tl.zeros([LANES], tl.int32)
    while at < stop:
        here = at + tl.arange(0, LANES)
        x = compensated(buffer, grad, here, here < limit, decay, gain, ADD)
        small = x * (1 / PIECE)
        if SPLIT:
            below += tl.where(x > 0, 0.0, small)  # NaN in both
            above += tl.where(x < 0, 0.0, small)
            fewer += tl.where(x < 0, 1, 0)
        elif VOTE:
            above += tl.where(tl.abs(x) > least, 1.0, 0.0)
        else:
            above += tl.abs(small)
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
    least,
    sums,
    negatives,
    keys,
    step,
    signs,
    signs_apart,
    means,
    means_apart,
    messages,
    flag,
    sent_flag,
    padding,
    length,
    own,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    MEAN: tl.constexpr,
    SPLIT: tl.constexpr,
    VOTE: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECE: tl.constexpr,
    SUMS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Write a piece's signs, its parameter's means, and leave the difference.

    In the shard ``own`` numbers that are not finite stay for ``book``.
    """
    piece = tl.program_id(0)
    if piece < messages:
        end_message(flag, sent_flag, padding + piece.to(tl.int64) * signs_apart, length)
    begin, stop, limit = place_of(table, count, piece, MEAN)
    shard = tl.load(table + SHARD * count + piece)
    signs += shard.to(tl.int64) * signs_apart + tl.load(table + BYTE * count + piece)
    means += shard.to(tl.int64) * means_apart
    part = tl.load(table + PART * count + piece)
    rank = tl.load(table + RANK * count + piece)
    first = piece - rank
    pieces = tl.load(table + PIECES * count + piece)
    numel = tl.load(table + NUMEL * count + piece)
    below, above = levels_of(
        sums, negatives, count, first, pieces, numel, SPLIT, VOTE, PIECE, SUMS, LEVELS
    )
    if ADD:
        idle = tl.load(peaks + tl.load(table + PLACE * count + piece)) == 0.0
        above = tl.where(idle, 0.0, above)
        below = tl.where(idle, 0.0, below)
    if piece == first:
        if SPLIT:
            tl.store(means + 2 * part, below)
            tl.store(means + 2 * part + 1, above)
        else:
            tl.store(means + part, above)
    bit = tl.arange(0, 8)[None, :]
    at = begin
    while at < stop:
        groups = at + 8 * tl.arange(0, GROUPS)
        here = groups[:, None] + bit  # (GROUPS, 8)
        inside = here < limit
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        seen = x
        if ADD:
            seen = tl.where(idle, 0.0, x)
        positive = tl.where(seen >= 0, 1, 0)  # not NaN
        if VOTE:
            key = tl.load(keys + tl.load(table + KEY * count + piece))
            coin = coins_of(key, step, rank * PIECE + here - begin)
            positive = tl.where(tl.abs(seen) > least, positive, coin)
        if KEEP:
            left = x - tl.where(positive == 1, above, below)
            if ADD:
                left = tl.where(idle, x, left)
                left = tl.where(is_finite(left) | ((shard == own) & (idle == 0)), left, 0.0)
            tl.store(buffer + here, left, mask=inside)
        marks = tl.sum(tl.where(here < stop, positive, 0) << bit, axis=1)
        tl.store(signs + (groups - begin) // 8, marks.to(tl.uint8), mask=groups < stop)
        at += 8 * GROUPS


@kernel()
def average_signs(
    signs,
    signs_apart,
    signs_shard,
    means,
    means_apart,
    means_shard,
    workers,
    share,
    out,
    flags,
    flags_apart,
    senders,
    table,
    count,
    least,
    MEAN: tl.constexpr,
    SPLIT: tl.constexpr,
    VOTE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write a piece of the mean: all workers' levels, in their order.

    With VOTE it is the sign of the mean, and 0 where the mean is below ``least``.
    """
    piece = tl.program_id(0)
    begin, stop, limit = place_of(table, count, piece, MEAN)
    shard = tl.load(table + SHARD * count + piece).to(tl.int64)
    signs += shard * signs_shard + tl.load(table + BYTE * count + piece)
    means += shard * means_shard
    part = tl.load(table + PART * count + piece)
    weight = tl.zeros([GROUPS, 8], tl.float32) + share
    lane = tl.arange(0, 8)[None, :]
    at = begin
    while at < stop:
        groups = at + 8 * tl.arange(0, GROUPS)
        here = groups[:, None] + lane  # (GROUPS, 8)
        total = tl.zeros([GROUPS, 8], tl.float32)
        sender = 0
        while sender < workers:
            place = signs + sender * signs_apart.to(tl.int64) + (groups - begin) // 8
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
        if VOTE:
            total = tl.where(total >= least, 1.0, tl.where(total <= -least, -1.0, 0.0))
        if senders > 0:
            first = tl.load(table + FIRST * count + piece)
            bad = arrived(flags, flags_apart, senders)
            total = tl.where(here == first, total + bad, total)
        tl.store(out + here, total, mask=here < limit)
        at += 8 * GROUPS


class Table:
    """Encodes and decodes the parts of a layout; see ``kernels.signs.Layout``.

    Args:
        layout: of the payloads.
        device: of the bucket.

    Attributes:
        pieces: of each piece the parameter's place, first element and end, first element in a row
            of shards, end with padding, first byte of signs; index of the part, which of its
            pieces, their number, elements of the part, the shard, the parameter's first element,
            and the index of the key, ``(13, m)`` int32.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, rows, self._ends = layout, list[tuple[int, ...]](), [0]
        self._keys: dict[tuple[int, int, int], Tensor] = {}
        for shard in layout.rows:
            for each in shard:
                count = -(-each.numel // PIECE)
                for rank in range(count):
                    at, end = rank * PIECE, min((rank + 1) * PIECE, each.numel)
                    start, limit = min(each.start + at, each.stop), each.start + end
                    rows.append(
                        (
                            *(each.place, start, min(limit, each.stop), each.row + at),
                            *(start + end - at, each.byte + at // 8),
                            *(each.part, rank, count, each.numel, each.shard),
                            layout.rows[0][each.part].start,
                            each.shard * len(shard) + each.part,
                        )
                    )
            self._ends.append(len(rows))
        self.pieces = torch.tensor(rows, dtype=torch.int32, device=device).t().contiguous()

    def encode(self, buffer: Tensor, bucket: Bucket) -> list[Packed]:
        """Return each shard's payload (signs, means), as ``core.segments.Pending`` says."""
        shards = self.layout.shards
        packed, flagged = reserved(self.layout.fields, buffer, bucket.pending, shards)
        own = bucket.worker if shards > 1 else -1
        self._take(packed, buffer, bucket, bucket.pending, flagged, own)
        return [payload.first(2) for payload in packed]

    def average(
        self, payloads: Sequence[Sequence[Tensor]], out: Tensor, pending: Pending | None
    ) -> None:
        """Write the mean of all workers' payloads, or all shards' payloads, to ``out``."""
        self._average(payloads, out, pending)

    def again(self, payloads: Sequence[Sequence[Tensor]], buffer: Tensor, bucket: Bucket) -> Packed:
        """Return the payload of the mean of this worker's shard, and book what it loses.

        Args:
            payloads: of this shard, from all workers.
            buffer: of the whole bucket; W times the loss is added to the shard.
            bucket: in its second phase.
        """
        pending, mine = bucket.pending, bucket.worker
        mean = buffer.new_empty(self.layout.numel)
        self._average(payloads, mean, None, mine)
        packed, flagged = reserved(self.layout.fields, buffer, pending)
        self._take(packed, mean, bucket, None, flagged, -1, mine)
        if pending is None or pending.grad is not None:
            book(buffer, mean, self.layout.shards, self._table(mine), pending)
        return packed[0].first(2)

    def _keys_of(self, bucket: Bucket) -> Tensor:
        """Return the key of each row of the layout, ``(n,)`` int64."""
        worker = bucket.seed, bucket.worker, bucket.phase
        if worker not in self._keys:
            keys = self.layout.keys(bucket)
            self._keys[worker] = torch.tensor(keys, dtype=torch.int64, device=self.pieces.device)
        return self._keys[worker]

    def _table(self, shard: int | None = None) -> tuple[tuple[int], Tensor, int]:
        """Return a grid of all pieces, or of a shard's, and the kernels' arguments for it."""
        start, stop = (0, self._ends[-1]) if shard is None else self._ends[shard : shard + 2]
        return (stop - start,), self.pieces.view(-1)[start:], self.pieces.shape[1]

    def _take(
        self,
        packed: Sequence[Packed],
        buffer: Tensor,
        bucket: Bucket,
        pending: Pending | None,
        flagged: Pending | None,
        own: int,
        mean_of: int | None = None,
    ) -> None:
        """Encode the bucket with ``pending``, or the mean of a shard."""
        grid, pieces, count = self._table(mean_of)
        split, vote = self.layout.levels == "means", self.layout.levels == "votes"
        adds = pending is not None and pending.grad is not None
        least = least_of(bucket.workers) if mean_of is not None else 0.0
        sums = buffer.new_empty(2 * count if split else count)
        negatives = self.pieces.new_empty(grid[0] if split else 1)
        *weighted, peaks = given(buffer, pending)
        kind = {"ADD": adds, "MEAN": mean_of is not None, "SPLIT": split, "VOTE": vote}
        launch(
            sum_pieces,
            grid,
            *(*weighted, pieces, count, least, sums, negatives),
            **kind,
            PIECE=PIECE,
            LANES=LANES,
            LEVELS=LANES.bit_length() - 1,
        )
        nbytes = 0 if mean_of is not None else packed[0].layout.nbytes
        launch(
            take_signs,
            grid,
            *(*weighted, peaks, pieces, count, least, sums, negatives),
            *(self._keys_of(bucket), bucket.step),
            *(packed[0][0], nbytes, packed[0][1], nbytes // 4, len(packed)),
            *(*ending(packed[0], flagged), own),
            **kind,
            PIECE=PIECE,
            KEEP=adds or pending is None,
            GROUPS=GROUPS,
            SUMS=SUMS,
            LEVELS=SUMS.bit_length() - 1,
        )

    def _average(
        self,
        payloads: Sequence[Sequence[Tensor]],
        out: Tensor,
        pending: Pending | None,
        mean_of: int | None = None,
    ) -> None:
        """Write all parts' means, or the mean of a shard as a row."""
        signs, signs_apart = evenly([payload[0] for payload in payloads])
        means, means_apart = evenly([payload[1] for payload in payloads])
        workers, shard = len(payloads), (0, 0)
        if self.layout.shards > 1 and mean_of is None:  # a payload for each shard
            workers, shard = 1, (signs_apart, means_apart)
        flags = [] if pending is None else pending.flags
        first, flags_apart = evenly(flags or [means])
        grid, *table = self._table(mean_of)
        launch(
            average_signs,
            grid,
            *(signs, signs_apart, shard[0], means, means_apart, shard[1], workers, 1 / workers),
            *(
                out,
                first,
                flags_apart,
                len(flags),
                *table,
                least_of(max(workers, self.layout.shards)),
            ),
            MEAN=mean_of is not None,
            SPLIT=self.layout.levels == "means",
            VOTE=self.layout.levels == "votes" and mean_of is None,
            GROUPS=GROUPS,
        )


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts, shapes = [("a", 0, 0, 500), ("b", 1, 500, 1000)], {"a": (500,), "b": (500,)}
    grad = numbers.roll(250)
    x = 0.5 * numbers + grad
    used, negative = x[:500], x[:500] < 0
    magnitude, fewer = by_torch(used.abs(), share_of(500)), int(negative.sum())
    below = by_torch(used.where(negative, 0.0), share_of(fewer))
    above = by_torch(used.where(~negative, 0.0), share_of(500 - fewer))
    one, places = torch.ones_like(above), torch.arange(500, device=x.device)
    sent: dict[Levels, tuple[Tensor, Tensor]] = {
        "magnitude": (-magnitude, magnitude),
        "means": (below, above),
        "votes": (-one, one),
    }
    for levels, (low, high) in sent.items():
        pending, left, out = replace(sample(numbers), grad=grad), numbers.clone(), numbers.clone()
        bucket, split = Bucket(numbers, shapes, pending=pending), levels == "means"
        layout = Layout(parts, levels)
        table = Table(layout, numbers.device)
        ((signs, means),) = table.encode(left, bucket)
        value = torch.cat([torch.where(negative, low, high), torch.zeros_like(x[500:])])
        tossed = coins(layout.keys(bucket)[1], 0, places)
        idle = tossed if levels == "votes" else torch.ones_like(negative)
        yield signs, torch.cat([pack(part.to(torch.uint8), 1) for part in (~negative, idle)])
        yield means, torch.stack([*[low, high][1 - split :], *torch.zeros_like(means[: 1 + split])])
        yield left, x - value
        table.average([(signs, means)] * 2, out, pending)
        yield out, value


def _shards(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts = [("a", 0, 0, 500), ("b", 1, 500, 1000)]
    yield from attempt_shards(numbers, Table(Layout(parts, "means", 2), numbers.device))


ATTEMPTS = {"signs": _attempt, "shards of signs": _shards}
