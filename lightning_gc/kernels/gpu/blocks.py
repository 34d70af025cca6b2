"""Triton kernels that code blocks of a bucket, or of its chosen elements, by a few numbers each.

A program takes a tile of complete blocks. Sums of a block are of neighbours, again and again, as in
``kernels.signs``, so they have torch's bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.core import elias_fano
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed, reserve
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.blocks import RANGE, BlockCode, Book
from lightning_gc.kernels.gpu import sparse, tiling
from lightning_gc.kernels.gpu.launch import end_message, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.levels import load_codes, store_codes
from lightning_gc.kernels.gpu.segments import compensated, flags_of, left_of, sample
from lightning_gc.kernels.shards import Layout, Parts, Payloads, ShardTable
from lightning_gc.kernels.sparse import Row, Selection

TILE = 2048
"""Elements that one program codes, or one block if it has more."""
LEAST, MOST = 8, 4096
"""Elements of a block, a power of two."""
BINS, BETWEEN, BOOK = map(tl.constexpr, range(3))
_KINDS = {"bins": 0, "range": 1, "book": 2}
HALF_ULP = tl.constexpr(12582912.0)
"""1.5·2^23: added and subtracted, it rounds a number below 2^22 to a whole one, halves to even."""


@triton.jit
def sums_of(x, LEVELS: tl.constexpr):
    """Return the sum of each row of ``(rows, 2 ** LEVELS)``: of neighbours, again and again."""
    for _ in tl.static_range(LEVELS - 1):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.sum(x, axis=1)


@triton.jit
def code_bins(x, there, own, between, real, LEVELS: tl.constexpr, BITS: tl.constexpr, SIGMAS):
    """Store each bin's mean; return codes and values of rows."""
    COUNT: tl.constexpr = 1 << BITS
    sound = there & (x == x)
    given = tl.where(sound, x, 0.0)
    largest = tl.max(magnitude_bits(given), axis=1)  # (rows,)
    exponent = tl.minimum(tl.maximum(254 - (largest >> 23), 1), 253)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = given * down[:, None] + 0.0
    members = tl.maximum(tl.sum(tl.where(sound, 1, 0), axis=1), 1).to(tl.float32)
    sigma = tl.sqrt_rn(tl.div_rn(sums_of(unit * unit, LEVELS), members))
    sigma = tl.where(sigma > 0, sigma, 1.0)
    code = tl.zeros_like(x).to(tl.int32)
    for i in tl.static_range(1, COUNT):
        edge = sigma * ((i - COUNT // 2) * (SIGMAS / COUNT))
        code += tl.where(unit >= edge[:, None], 1, 0)
    value = tl.zeros_like(x)
    for i in tl.static_range(COUNT):
        hit = sound & (code == i)
        some = tl.maximum(tl.sum(tl.where(hit, 1, 0), axis=1), 1).to(tl.float32)
        mean = tl.div_rn(sums_of(tl.where(hit, unit, 0.0), LEVELS), some) * up
        tl.store(own + i * between, mean, mask=real)
        value = tl.where(code == i, mean[:, None], value)
    return code, value


@triton.jit
def between_ends(code, low, high):
    """Return the value of a code between two ends of a block."""
    share = tl.div_rn(code.to(tl.float32), tl.zeros_like(low) + 255.0)
    value = (1.0 - share) * low + share * high
    value = tl.where(value < low, low, value)
    return tl.where(value > high, high, value)


@triton.jit
def code_range(x, there, own, between, real):
    """Store each row's ends; return codes and values of rows."""
    sound = there & (x == x)
    low = tl.where(real, tl.min(tl.where(sound, x, float("inf")), axis=1) + 0.0, 0.0)
    high = tl.where(real, tl.max(tl.where(sound, x, -float("inf")), axis=1) + 0.0, 0.0)
    bad = tl.sum(tl.where(there & (x != x), 1, 0), axis=1) > 0
    low = tl.where(bad, float("nan"), low)
    high = tl.where(bad, float("nan"), high)
    extent = high * 0.5 - low * 0.5
    # Older versions of Triton flush subnormal numbers to zero in divisions: scale them up.
    larger = tl.where(extent < 2.0**-64, 2.0**96, 1.0)
    divisor = tl.where(extent > 0, extent, 1.0) * larger
    above = (x * 0.5 - (low * 0.5)[:, None]) * larger[:, None]
    share = tl.div_rn(above, tl.zeros_like(x) + divisor[:, None]) * 255.0
    share = tl.where(share > 255.0, 255.0, tl.where(share > 0.0, share, 0.0))  # NaN: 0
    code = ((share + HALF_ULP) - HALF_ULP).to(tl.int32)
    tl.store(own, low, mask=real)
    tl.store(own + between, high, mask=real)
    ends = tl.zeros_like(x)
    return code, between_ends(code, ends + low[:, None], ends + high[:, None])


@triton.jit
def code_by_book(x, there, own, real, book, top, sign, STEPS: tl.constexpr):
    """Store each row's largest magnitude; return codes and values of rows."""
    largest = tl.max(tl.where(there, magnitude_bits(x), 0), axis=1).to(tl.float32, bitcast=True)
    tl.store(own, largest, mask=real)
    larger = tl.where(largest < 2.0**-64, 2.0**96, 1.0)
    divisor = tl.where(largest > 0, largest, 1.0) * larger
    share = tl.div_rn(x * larger[:, None], tl.zeros_like(x) + divisor[:, None])
    sought = share
    if top > 0:
        sought = tl.where(share == share, tl.abs(share) * top, 0.0)
    code = tl.zeros_like(x).to(tl.int32)
    for i in tl.static_range(STEPS):
        middle = tl.load(book + code + ((1 << (STEPS - 1 - i)) - 1))
        code = tl.where(middle >= sought, code, code + (1 << (STEPS - 1 - i)))
    code += tl.where(share < 0, sign, 0)
    return code, tl.load(book + ((1 << STEPS) - 1) + code) * largest[:, None]


@kernel()
def round_blocks(
    buffer, grad, decay, gain, peaks,
    tiles, parts,
    positions, target, between,
    book, top, sign,
    codes, codes_apart, numbers, messages,
    flag, sent_flag, padding, length,
    own,
    ADD: tl.constexpr, KEEP: tl.constexpr, GUARDED: tl.constexpr, CHOSEN: tl.constexpr,
    MEAN: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr,
    LEVELS: tl.constexpr, SIGMAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Code a tile. With CHOSEN the buffer has chosen elements, and ``target`` keeps their errors.

    Else also write the ends of messages. In the shard ``own`` numbers that are not finite stay for
    ``book``.
    """
    tile = tl.program_id(0)
    if tile < messages:
        end_message(flag, sent_flag, padding + tile.to(tl.int64) * codes_apart, length)
    part, local, start, present, numel = tiling.tile_of(tiles, parts, tile, MEAN)
    idle = part < 0
    if GUARDED:
        idle = tiling.is_idle(peaks, parts, part)
    SIZE: tl.constexpr = 1 << LEVELS
    row = tl.arange(0, TILE // SIZE)
    at = local + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]  # (rows, SIZE)
    there = at < numel
    whole = compensated(buffer, grad, start + at, at < present, decay, gain, ADD)
    x = whole
    if ADD:
        x = tl.where(idle, 0.0, whole)
    first = local // SIZE + row
    real = first * SIZE < numel
    mine = numbers + tiling.field_at(parts, part, tiling.BLOCKS, codes_apart // 4) + first
    if KIND == BINS:
        code, value = code_bins(x, there, mine, between, real, LEVELS, BITS, SIGMAS)
    elif KIND == BETWEEN:
        code, value = code_range(x, there, mine, between, real)
    else:
        code, value = code_by_book(x, there, mine, real, book, top, sign, STEPS)
    if KEEP:
        kept_here = tiling.cell(parts, part, tiling.SHARD) == own
        left = left_of(x, value, whole, idle, kept_here, GUARDED)
        if CHOSEN:
            place = tl.load(positions + start + at, mask=there, other=0)
            kept = tl.where(idle, 0, tl.where(there, 1, 0)) == 1
            tl.store(target + place, left, mask=kept)
        else:
            tl.store(buffer + start + at, left, mask=at < present)
    groups = local // 8 + tl.arange(0, TILE // 8)
    lanes = groups[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = codes + tiling.field_at(parts, part, tiling.CODES, codes_apart)
    store_codes(packed, tl.reshape(code, (TILE // 8, 8)), groups, lanes, numel, BITS)


@kernel()
def average_blocks(
    codes, codes_apart, codes_shard,
    numbers, numbers_apart, numbers_shard,
    workers, share, out,
    flags, flags_apart, senders,
    tiles, parts,
    out_apart, between, book,
    MEAN: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr,
    LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a tile of the mean of ``workers`` payloads; the second index is the first payload's."""
    sender = tl.program_id(1)
    out += sender.to(tl.int64) * out_apart
    part, local, start, present, numel = tiling.tile_of(tiles, parts, tl.program_id(0), MEAN)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    there = at < numel
    packed = codes + tiling.field_at(parts, part, tiling.CODES, codes_shard)
    packed += sender.to(tl.int64) * codes_apart
    own = numbers + tiling.field_at(parts, part, tiling.BLOCKS, numbers_shard)
    own += sender.to(tl.int64) * numbers_apart + (at >> LEVELS)
    total = tl.zeros([GROUPS, 8], tl.float32)
    weight = total + share
    arrival = sender * 0
    while arrival < workers:
        code = load_codes(packed, groups, at, numel, BITS)
        if KIND == BINS:
            value = tl.load(own + code * between, mask=there, other=0.0)
        elif KIND == BETWEEN:
            low = tl.load(own, mask=there, other=0.0)
            high = tl.load(own + between, mask=there, other=0.0)
            value = between_ends(code, low, high)
        else:
            value = tl.load(book + ((1 << STEPS) - 1) + code)
            value = value * tl.load(own, mask=there, other=0.0)
        total = tl.fma(value, weight, total)  # as torch adds with a factor
        packed += codes_apart
        own += numbers_apart
        arrival += 1
    here = start + at
    total = tiling.flagged(total, here, flags, flags_apart, senders, parts, part)
    tl.store(out + here, total, mask=at < present)


class Table(ShardTable):
    """Encodes and decodes parts of a bucket, W shards of each, or its chosen elements.

    Args:
        parts, shards: as for ``kernels.shards.Layout``.
        code: of blocks whose size is a power of two from 8 to 4,096.
        device: of the bucket.
    """

    chooses = True

    @classmethod
    def takes(cls, code: BlockCode) -> bool:
        size = code.block_size
        return LEAST <= size <= MOST and not size & (size - 1)

    def __init__(
        self, parts: Parts, code: BlockCode, device: torch.device, shards: int = 1
    ) -> None:
        size = code.block_size
        layout, tile = Layout(parts, code.bits, size, shards), max(TILE, size)
        super().__init__(layout, *[layout.blocks] * code.numbers)
        self._tiles = tiling.Tiles(layout, tile, device)
        self._book, self._top, self._sign, steps = _on_device(code.book, device)
        self._constants = {
            "KIND": _KINDS[code.kind],
            "BITS": code.bits,
            "STEPS": steps,
            "LEVELS": size.bit_length() - 1,
            "TILE": tile,
            "num_warps": 4 if tile <= TILE else 8,
        }

    def encode_chosen(
        self, buffer: Tensor, selection: Selection, pending: Pending | None
    ) -> Packed:
        """Return the payload (codes, numbers, coded positions) of the elements to send.

        Args:
            buffer: of the whole bucket; the unsent part remains.
            selection: as for ``sparse.take``; this table has a part for the elements of each row.
            pending: the engine's work, or None.
        """
        chosen = self.layout.numel
        length = elias_fano.coded_bytes(chosen, buffer.numel())
        fields = [*self.fields, (torch.uint8, length)]
        packed = pending.reserve(fields) if pending else reserve(fields, buffer.device)
        values, coded = buffer.new_empty(chosen), packed[len(self.fields)]
        positions = sparse.take(buffer, selection, values, coded, packed, pending)
        peaks = buffer if pending is None else pending.peaks
        self._round(
            [values, values, 1.0, 1.0, peaks],
            *(positions, buffer, None),
            *(packed[0], 0, packed[1], 0, values, values, packed.padding, 0, -1),
            ADD=False,
            KEEP=pending is None or pending.grad is not None,
            GUARDED=pending is not None,
            CHOSEN=True,
        )
        return packed.first(len(fields))

    def average_chosen(
        self, payloads: Payloads, out: Tensor, selection: Selection, pending: Pending
    ) -> None:
        """Write the mean of all workers' payloads of ``encode_chosen`` to ``out``."""
        values = out.new_empty(len(payloads), self.layout.numel)
        self.average(payloads, values, None, rows=len(payloads))
        sent = [(mine, payload[-1]) for mine, payload in zip(values, payloads, strict=True)]
        sparse.average(sent, None, out, selection, pending)

    def _encode(
        self, packed: Sequence[Packed], buffer: Tensor, bucket: Bucket, mine: int | None
    ) -> None:
        adds, keeps, given = tiling.source(buffer, bucket, mine)
        kind = {"ADD": adds, "KEEP": keeps, "GUARDED": adds, "CHOSEN": False}
        self._round(given, buffer, buffer, mine, *tiling.target(packed, bucket), **kind)

    def _round(
        self,
        given: Sequence[Tensor | float],
        positions: Tensor,
        kept: Tensor,
        mine: int | None,
        *sent: Tensor | int,
        **kind: bool,
    ) -> None:
        grid, *table = self._tiles.table(mine)
        launch(
            round_blocks,
            grid,
            *(*given, *table, positions, kept, self.layout.blocks),
            *(self._book, self._top, self._sign, *sent),
            **kind,
            MEAN=mine is not None,
            SIGMAS=RANGE,
            **self._constants,
        )

    def average(
        self,
        payloads: Payloads,
        out: Tensor,
        pending: Pending | None,
        mine: int | None = None,
        rows: int = 1,
    ) -> bool:
        """Write a mean; or to so many rows of ``out`` each payload's values."""
        (tiles,), *table = self._tiles.table(mine)
        *read, workers, _ = tiling.arrivals(self, payloads, mine)
        workers //= rows
        launch(
            average_blocks,
            (tiles, rows),
            *(*read, workers, 1 / workers, out, *flags_of(pending, out), *table),
            *(self.layout.numel, self.layout.blocks, self._book),
            MEAN=mine is not None,
            **self._constants,
        )
        return True


def _on_device(book: Book | None, device: torch.device) -> tuple[Tensor, float, int, int]:
    """Return middles, filled up to one less than a power of two, and values; top, sign, its log."""
    if book is None:
        return torch.zeros(1, dtype=torch.float32, device=device), 0.0, 0, 0
    steps = book.middles.numel().bit_length()
    filled = pad(book.middles, (0, (1 << steps) - 1 - book.middles.numel()), value=float("inf"))
    return torch.cat([filled, book.values]).to(device), book.top, book.sign, steps


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    x = 0.5 * numbers + numbers.flip(0)
    used = torch.arange(1000, device=numbers.device) < 500  # the other parameter is idle
    sent, kept = x.where(used, 0.0), x.where(~used, 0.0)
    halves = [("a", 0, 0, 500), ("b", 1, 500, 1000)]
    table = Table(halves, BlockCode("range", 8, 64, 2), numbers.device)
    pending, left, out = sample(numbers), numbers.clone(), numbers.clone()
    bucket = Bucket(numbers, {"a": (500,), "b": (500,)}, pending=pending)
    (payload,) = table.encode(left, bucket)
    table.average([payload] * 2, out, pending)
    low, high = (
        ends.view(2, -1).repeat_interleave(64, dim=1)[:, :500].reshape(-1) for ends in payload[1:3]
    )
    value = low + (high - low) * payload[0] / 255
    yield out, value
    yield left, sent - value + kept
    yield (sent - value).abs() <= (high - low) / 509, torch.ones_like(used)
    rows = tuple(Row(i, 500 * i, 500 * i + 500, 50, 100, 10) for i in range(2))
    few = Table([("a", 0, 0, 50), ("b", 1, 50, 100)], BlockCode("bins", 2, 16, 4), numbers.device)
    chosen = Selection("chunks", rows)
    pending, left = sample(numbers), numbers.clone()
    payload = few.encode_chosen(left, chosen, pending)
    few.average_chosen([payload] * 2, out, chosen, pending)
    yield left + out, x
    yield (out[:500] != 0).sum(), used[::10].sum()


def _shards(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    halves = [("a", 0, 0, 500), ("b", 1, 500, 1000)]
    table = Table(halves, BlockCode("range", 8, 64, 2), numbers.device, 2)
    yield from tiling.attempt_shards(numbers, table)


ATTEMPTS = {"blocks": _attempt, "block shards": _shards}
