"""Triton kernels that send a bit per element of a bucket and the means of its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed
from lightning_gc.core.segments import PIECE, Pending
from lightning_gc.kernels.gpu import tiling
from lightning_gc.kernels.gpu.launch import end_message, kernel, launch, word
from lightning_gc.kernels.gpu.positions import sum_of
from lightning_gc.kernels.gpu.segments import compensated, flags_of, left_of, sample
from lightning_gc.kernels.shards import Payloads
from lightning_gc.kernels.signs import LANES, SUMS, SignTable, attempt, least_of

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
def levels_of(
    sums, lows, negatives, first, pieces, numel,
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
            fewer = sum_of(negatives, first, first + pieces, SUMS)
            share = PIECE * tl.div_rn(1.0, tl.maximum(fewer, 1).to(tl.float32))
            below = mean_of(lows, first, pieces, share, SUMS, LEVELS)
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


@kernel()
def sum_pieces(
    buffer, grad, decay, gain, peaks,
    tiles, parts,
    least,
    sums, lows, negatives,
    ADD: tl.constexpr, MEAN: tl.constexpr, SPLIT: tl.constexpr, VOTE: tl.constexpr,
    PIECE: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Add a piece's magnitudes; with SPLIT its elements below 0 and the others, and count them.

    With VOTE count magnitudes above ``least``.
    """
    piece = tl.program_id(0)
    _, at, start, there, numel = tiling.tile_of(tiles, parts, piece, MEAN)
    stop = tl.minimum(at + PIECE, numel)
    above = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    fewer = tl.zeros([LANES], tl.int32)
    while at < stop:
        here = at + tl.arange(0, LANES)
        x = compensated(buffer, grad, start + here, here < there, decay, gain, ADD)
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
        tl.store(lows + piece, in_pairs(below, LEVELS))
        tl.store(negatives + piece, tl.sum(fewer, axis=0))


@kernel()
def take_signs(
    buffer, grad, decay, gain, peaks,
    tiles, parts,
    least,
    sums, lows, negatives,
    keys, step,
    signs, signs_apart, means, messages,
    flag, sent_flag, padding, length,
    own,
    ADD: tl.constexpr, KEEP: tl.constexpr, MEAN: tl.constexpr, SPLIT: tl.constexpr,
    VOTE: tl.constexpr, GROUPS: tl.constexpr, PIECE: tl.constexpr, SUMS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Write a piece's signs, its parameter's means, and leave the difference.

    In the shard ``own`` numbers that are not finite stay for ``book``.
    """
    piece = tl.program_id(0)
    if piece < messages:
        end_message(flag, sent_flag, padding + piece.to(tl.int64) * signs_apart, length)
    part, at, start, there, numel = tiling.tile_of(tiles, parts, piece, MEAN)
    stop = tl.minimum(at + PIECE, numel)
    shard = tiling.cell(parts, part, tiling.SHARD)
    signs += tiling.field_at(parts, part, tiling.CODES, signs_apart)
    means += shard.to(tl.int64) * (signs_apart // 4)
    block = tiling.cell(parts, part, tiling.BLOCKS)
    first = piece - at // PIECE
    pieces = (numel + PIECE - 1) // PIECE
    below, above = levels_of(
        sums, lows, negatives, first, pieces, numel, SPLIT, VOTE, PIECE, SUMS, LEVELS
    )
    idle = part < 0
    if ADD:
        idle = tiling.is_idle(peaks, parts, part)
        above = tl.where(idle, 0.0, above)
        below = tl.where(idle, 0.0, below)
    if piece == first:
        if SPLIT:
            tl.store(means + 2 * block, below)
            tl.store(means + 2 * block + 1, above)
        else:
            tl.store(means + block, above)
    bit = tl.arange(0, 8)[None, :]
    while at < stop:
        groups = at + 8 * tl.arange(0, GROUPS)
        here = groups[:, None] + bit  # (GROUPS, 8)
        inside = here < there
        x = compensated(buffer, grad, start + here, inside, decay, gain, ADD)
        seen = x
        if ADD:
            seen = tl.where(idle, 0.0, x)
        positive = tl.where(seen >= 0, 1, 0)  # not NaN
        if VOTE:
            coin = coins_of(tl.load(keys + part), step, here)
            positive = tl.where(tl.abs(seen) > least, positive, coin)
        if KEEP:
            value = tl.where(positive == 1, above, below)
            left = left_of(x, value, x, idle, shard == own, ADD)
            tl.store(buffer + start + here, left, mask=inside)
        marks = tl.sum(tl.where(here < stop, positive, 0) << bit, axis=1)
        tl.store(signs + groups // 8, marks.to(tl.uint8), mask=groups < stop)
        at += 8 * GROUPS


@kernel()
def average_signs(
    signs, signs_apart, signs_shard,
    means, means_apart, means_shard,
    workers, share, out,
    flags, flags_apart, senders,
    tiles, parts,
    least,
    MEAN: tl.constexpr, SPLIT: tl.constexpr, VOTE: tl.constexpr, GROUPS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Write a piece of the mean: all workers' levels, in their order.

    With VOTE it is the sign of the mean, and 0 where the mean is below ``least``.
    """
    part, at, start, there, numel = tiling.tile_of(tiles, parts, tl.program_id(0), MEAN)
    stop = tl.minimum(at + PIECE, numel)
    signs += tiling.field_at(parts, part, tiling.CODES, signs_shard)
    means += tiling.cell(parts, part, tiling.SHARD).to(tl.int64) * means_shard
    block = tiling.cell(parts, part, tiling.BLOCKS)
    weight = tl.zeros([GROUPS, 8], tl.float32) + share
    lane = tl.arange(0, 8)[None, :]
    while at < stop:
        groups = at + 8 * tl.arange(0, GROUPS)
        here = groups[:, None] + lane  # (GROUPS, 8)
        total = tl.zeros([GROUPS, 8], tl.float32)
        sender = 0
        while sender < workers:
            place = signs + sender * signs_apart.to(tl.int64) + groups // 8
            marks = tl.load(place, mask=groups < stop, other=0).to(tl.int32)
            own = means + sender * means_apart.to(tl.int64)
            if SPLIT:
                below = tl.load(own + 2 * block)
                above = tl.load(own + 2 * block + 1)
            else:
                above = tl.load(own + block)
                below = -above
            level = tl.where(((marks[:, None] >> lane) & 1) == 1, above, below)
            total = tl.fma(level, weight, total)  # as torch adds with a factor
            sender += 1
        if VOTE:
            total = tl.where(total >= least, 1.0, tl.where(total <= -least, -1.0, 0.0))
        total = tiling.flagged(total, start + here, flags, flags_apart, senders, parts, part)
        tl.store(out + start + here, total, mask=here < there)
        at += 8 * GROUPS


class Table(SignTable):
    """Encodes and decodes parts of a bucket; see ``kernels.signs.SignTable``."""

    @functools.cached_property
    def _tiles(self) -> tiling.Tiles:
        return tiling.Tiles(self.layout, PIECE, self.device)

    def _encode(
        self, packed: Sequence[Packed], buffer: Tensor, bucket: Bucket, mine: int | None
    ) -> None:
        adds, keeps, given = tiling.source(buffer, bucket, mine)
        grid, *table = self._tiles.table(mine)
        split, vote = self.levels == "means", self.levels == "votes"
        least = 0.0 if mine is None else least_of(bucket.workers)
        sums = buffer.new_empty(1 + split, grid[0])
        negatives = self._tiles.of.new_empty(grid[0] if split else 1)
        read = *given, *table, least, sums, sums[-1], negatives
        kind = {"ADD": adds, "MEAN": mine is not None, "SPLIT": split, "VOTE": vote, "PIECE": PIECE}
        launch(sum_pieces, grid, *read, **kind, LANES=LANES, LEVELS=LANES.bit_length() - 1)
        launch(
            take_signs,
            grid,
            *(*read, self._tiles.keys(bucket) if vote else self._tiles.parts, bucket.step),
            *tiling.target(packed, bucket),
            **kind,
            KEEP=keeps,
            GROUPS=GROUPS,
            SUMS=SUMS,
            LEVELS=SUMS.bit_length() - 1,
        )

    def average(
        self, payloads: Payloads, out: Tensor, pending: Pending | None, mine: int | None = None
    ) -> bool:
        grid, *table = self._tiles.table(mine)
        launch(
            average_signs,
            grid,
            *(*tiling.arrivals(self, payloads, mine), out, *flags_of(pending, out), *table),
            least_of(len(payloads)),
            MEAN=mine is not None,
            SPLIT=self.levels == "means",
            VOTE=self.levels == "votes" and mine is None,
            GROUPS=GROUPS,
            PIECE=PIECE,
        )
        return True


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from attempt(
        Table, numbers, lambda: replace(sample(numbers), grad=numbers.roll(numbers.numel() // 4))
    )


def _shards(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts = [("a", 0, 0, 500), ("b", 1, 500, 1000)]
    yield from tiling.attempt_shards(numbers, Table(parts, "means", numbers.device, 2))


ATTEMPTS = {"signs": _attempt, "shards of signs": _shards}
