"""Tiles, reads and writes of Triton kernels over shards of a bucket; see ``kernels.shards``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed, evenly, joined
from lightning_gc.kernels.gpu.segments import arrived, given, sample
from lightning_gc.kernels.shards import Layout, Payloads, Row, ShardTable

PLACE, BEGIN, START, STOP, NUMEL, CODES, BLOCKS, SHARD, IN_ROW = map(tl.constexpr, range(9))
"""Columns of ``Tiles.parts``: the fields of ``kernels.shards.Row``."""
FIELDS = tl.constexpr(9)


@triton.jit
def cell(parts, part, ROW: tl.constexpr):
    """Return an entry of ``Tiles.parts`` that fits into 32 bits."""
    return tl.load(parts + FIELDS * part + ROW).to(tl.int32)


@triton.jit
def field_at(parts, part, ROW: tl.constexpr, apart):
    """Return where a part's codes or numbers begin; messages of shards are ``apart``."""
    shard = tl.load(parts + FIELDS * part + SHARD)
    return tl.load(parts + FIELDS * part + ROW) + shard * apart


@triton.jit
def tile_of(tiles, parts, tile, MEAN: tl.constexpr):
    """Return where a tile is: its part, its first element in the part, and the part's place.

    The place is the part's first element, in the bucket or in a shard's mean, how many elements
    are there, and how many are encoded.
    """
    part, local = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    numel = cell(parts, part, NUMEL)
    if MEAN:
        start, there = cell(parts, part, IN_ROW), numel
    else:
        start = cell(parts, part, START)
        there = cell(parts, part, STOP) - start
    return part, local, start, there, numel


@triton.jit
def is_idle(peaks, parts, part):
    """Return whether zeros are sent for a part, because its gradient is zero."""
    return tl.load(peaks + cell(parts, part, PLACE)) == 0.0


@triton.jit
def flagged(total, here, flags, flags_apart, senders, parts, part):
    """Return elements of a mean; the first one of a parameter has the flags."""
    if senders > 0:
        begin = cell(parts, part, BEGIN)
        total = tl.where(here == begin, total + arrived(flags, flags_apart, senders), total)
    return total


class Tiles:
    """A layout on a device, cut into tiles: what programs take at once.

    Args:
        layout: of a bucket.
        size: elements of a tile, at most.
        device: of the bucket.

    Attributes:
        parts: the rows of the layout, ``(n, 9)`` int64.
        of: row of ``parts`` and first element in the shard of each tile, ``(m, 2)`` int32.
    """

    def __init__(self, layout: Layout, size: int, device: torch.device) -> None:
        self._names, self._ends = layout.names, [0]
        self._keys: dict[tuple[int, int, int], Tensor] = {}
        found, tiles = list[Row](), list[tuple[int, int]]()
        for rows in layout.rows:
            for row in rows:
                tiles += [(len(found), local) for local in range(0, row.numel, size)]
                found.append(row)
            self._ends.append(len(tiles))
        self.parts = torch.tensor(found, dtype=torch.int64, device=device)
        self.of = torch.tensor(tiles, dtype=torch.int32, device=device)

    def table(self, shard: int | None) -> tuple[tuple[int], Tensor, Tensor]:
        """Return a grid of all tiles, or of a shard's, and the kernels' arguments for it."""
        start, stop = (0, self._ends[-1]) if shard is None else self._ends[shard : shard + 2]
        return (stop - start,), self.of[start:], self.parts

    def keys(self, bucket: Bucket) -> Tensor:
        """Return the key of each row's random numbers, ``(n,)`` int64; from a cache."""
        worker = bucket.seed, bucket.worker, bucket.phase
        if worker not in self._keys:
            keys = [bucket.key(name) for name in self._names]
            self._keys[worker] = torch.tensor(keys, dtype=torch.int64, device=self.parts.device)
        return self._keys[worker]


def source(buffer: Tensor, bucket: Bucket, mine: int | None) -> tuple[bool, bool, list[Any]]:
    """Return whether a gradient is added, whether errors are kept, and what is encoded."""
    pending = bucket.pending if mine is None else None
    adds = pending is not None and pending.grad is not None
    return adds, adds or pending is None, [*given(buffer, pending)]


def target(packed: Sequence[Packed], bucket: Bucket) -> tuple[Any, ...]:
    """Return what encoders write to: codes, numbers, ends of messages; and the own shard.

    Numbers of the own shard that are not finite stay for ``book``. Without a flag an end is written
    to memory that nobody reads.
    """
    first, (codes, numbers, *_) = packed[0], packed[0]
    if len(packed) == 1 and bucket.pending is not None:
        return codes, 0, numbers, 1, *bucket.pending.ending(first), -1
    flag = numbers.new_empty(2)
    end = flag[:1], flag[1:], first.padding, first.layout.padding
    own, nbytes = (bucket.worker, first.layout.nbytes) if len(packed) > 1 else (-1, 0)
    return codes, nbytes, numbers, len(packed), *end, own


def arrivals(table: ShardTable, payloads: Payloads, mine: int | None) -> tuple[Any, ...]:
    """Return what decoders read: codes and numbers with their distances, and whose mean it is.

    The distances are from worker to worker, and from shard to shard. Payloads of different shards
    are not added.
    """
    codes, codes_apart = evenly([payload[0] for payload in payloads])
    end = len(table.fields)
    numbers, numbers_apart = evenly([joined(payload[1:end]) for payload in payloads])
    if table.layout.shards > 1 and mine is None:
        return codes, 0, codes_apart, numbers, 0, numbers_apart, 1, 1.0
    return codes, codes_apart, 0, numbers, numbers_apart, 0, len(payloads), 1 / len(payloads)


def attempt_shards(numbers: Tensor, table: ShardTable) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what ``table``, of two shards of the parts a and b of ``sample``, books twice."""
    shapes = {"a": (500,), "b": (500,)}
    for worker in range(2):
        bucket = Bucket(numbers, shapes, worker=worker, workers=2, pending=sample(numbers))
        left, means = numbers.clone(), numbers.new_empty(3, 1000)
        sent = [table.encode(flat, bucket) for flat in (left, numbers.flip(0).pow(3))]
        before = left.clone()
        again = table.again([payloads[worker] for payloads in sent], left, bucket.again())
        for payloads, mean in zip([*sent, [again, again]], means, strict=True):
            table.average(payloads, mean, bucket.pending)
        first, second, both = means.view(3, 2, 2, 250)[:, :, worker]
        wanted = before.view(2, 2, 250).clone()
        wanted[:, worker] += 2 * ((first + second) / 2 - both)
        yield left, wanted.view(-1)
