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
from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.core.message import Packed, evenly, joined, reserve
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.blocks import RANGE, BlockCode, Book
from lightning_gc.kernels.gpu import sparse
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.levels import load_codes, store_codes
from lightning_gc.kernels.gpu.segments import arrived, compensated, sample
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
def column(table, index, parts, part):
    """Return a number of a part: its place, first element, elements, first code, first block."""
    return tl.load(table + index * parts + part)


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
    buffer,
    grad,
    decay,
    gain,
    peaks,
    tiles,
    count,
    table,
    parts,
    positions,
    target,
    codes,
    numbers,
    between,
    book,
    top,
    sign,
    flag,
    sent_flag,
    padding,
    length,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    GUARDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    LEVELS: tl.constexpr,
    SIGMAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Code a tile. With CHOSEN the buffer has chosen elements, and ``target`` keeps their errors.

    Else also write the end of the message.
    """
    tile = tl.program_id(0)
    if CHOSEN == 0 and tile == 0:
        end_message(flag, sent_flag, padding, length)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    start = column(table, 1, parts, part)
    numel = column(table, 2, parts, part)
    idle = part < 0
    if GUARDED:
        idle = tl.load(peaks + column(table, 0, parts, part)) == 0.0
    SIZE: tl.constexpr = 1 << LEVELS
    row = tl.arange(0, TILE // SIZE)
    at = local + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]  # (rows, SIZE)
    there = at < numel
    whole = compensated(buffer, grad, start + at, there, decay, gain, ADD)
    x = whole
    if ADD:
        x = tl.where(idle, 0.0, whole)
    first = local // SIZE + row
    real = first * SIZE < numel
    own = numbers + column(table, 4, parts, part) + first
    if KIND == BINS:
        code, value = code_bins(x, there, own, between, real, LEVELS, BITS, SIGMAS)
    elif KIND == BETWEEN:
        code, value = code_range(x, there, own, between, real)
    else:
        code, value = code_by_book(x, there, own, real, book, top, sign, STEPS)
    if KEEP:
        left = x - value
        if GUARDED:
            left = tl.where(is_finite(left), left, 0.0)
        if CHOSEN:
            place = tl.load(positions + start + at, mask=there, other=0)
            kept = tl.where(idle, 0, tl.where(there, 1, 0)) == 1
            tl.store(target + place, left, mask=kept)
        else:
            if ADD:
                left = tl.where(idle, tl.where(is_finite(whole), whole, 0.0), left)
            tl.store(buffer + start + at, left, mask=there)
    groups = local // 8 + tl.arange(0, TILE // 8)
    lanes = groups[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = codes + column(table, 3, parts, part)
    store_codes(packed, tl.reshape(code, (TILE // 8, 8)), groups, lanes, numel, BITS)


@kernel()
def average_blocks(
    codes,
    codes_apart,
    numbers,
    numbers_apart,
    between,
    workers,
    share,
    out,
    out_apart,
    flags,
    flags_apart,
    senders,
    starts,
    tiles,
    count,
    table,
    parts,
    book,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a tile of the mean of ``workers`` payloads; the second index is the first payload's."""
    tile = tl.program_id(0)
    sender = tl.program_id(1)
    out += sender.to(tl.int64) * out_apart
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    start = column(table, 1, parts, part)
    numel = column(table, 2, parts, part)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    there = at < numel
    packed = codes + column(table, 3, parts, part) + sender.to(tl.int64) * codes_apart
    own = numbers + column(table, 4, parts, part) + sender.to(tl.int64) * numbers_apart
    own += at >> LEVELS
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
    if senders > 0:
        begin = tl.load(starts + column(table, 0, parts, part))
        total = tl.where(here == begin, total + arrived(flags, flags_apart, senders), total)
    tl.store(out + here, total, mask=there)


def takes(code: BlockCode) -> bool:
    """Return whether the kernels take blocks of this size."""
    size = code.block_size
    return LEAST <= size <= MOST and not size & (size - 1)


class Table:
    """The parts of a bucket, or of its chosen elements, that share a payload of a code.

    Args:
        parts: place among the bucket's parameters, first element and end of each part.
        code: which ``takes`` accepts.
        device: of the bucket.

    Attributes:
        fields: dtype and length of codes and of each of the numbers.
        numel: elements of all parts.
    """

    def __init__(
        self, parts: Sequence[tuple[int, int, int]], code: BlockCode, device: torch.device
    ) -> None:
        size = code.block_size
        tile, rows, tiles = max(TILE, size), list[tuple[int, ...]](), list[tuple[int, int]]()
        codes = blocks = 0
        for index, (place, start, stop) in enumerate(parts):
            rows.append((place, start, stop - start, codes, blocks))
            tiles += [(index, local) for local in range(0, stop - start, tile)]
            codes += packed_bytes(stop - start, code.bits)
            blocks -= (start - stop) // size
        self.fields = [(torch.uint8, codes), *[(torch.float32, blocks)] * code.numbers]
        self.numel, self._blocks = sum(row[2] for row in rows), blocks
        self._parts, self._tiles = (
            torch.tensor(table, dtype=torch.int32, device=device).t().contiguous()
            for table in (rows, tiles)
        )
        self._book, self._top, self._sign, steps = _on_device(code.book, device)
        self._constants = {
            "KIND": _KINDS[code.kind],
            "BITS": code.bits,
            "STEPS": steps,
            "LEVELS": size.bit_length() - 1,
            "TILE": tile,
            "num_warps": 4 if tile <= TILE else 8,
        }

    def encode(self, buffer: Tensor, pending: Pending | None) -> Packed:
        """Return the payload (codes, numbers), as ``core.segments.Pending`` says."""
        packed = (
            reserve(self.fields, buffer.device) if pending is None else pending.reserve(self.fields)
        )
        flag = buffer.new_empty(2)
        ending = (flag[:1], flag[1:], packed.padding, packed.layout.padding)
        given, adds = (buffer, buffer, 1.0, 1.0, buffer), False
        if pending is not None:
            adds, ending = pending.grad is not None, pending.ending(packed)
            grad = buffer if pending.grad is None else pending.grad
            given = (buffer, grad, pending.decay, pending.gain, pending.peaks)
        self._round(
            *(packed, *given, buffer, buffer, *ending),
            ADD=adds,
            KEEP=adds or pending is None,
            GUARDED=adds,
            CHOSEN=False,
        )
        return packed.first(len(self.fields))

    def encode_chosen(
        self, buffer: Tensor, selection: Selection, pending: Pending | None
    ) -> Packed:
        """Return the payload (codes, numbers, coded positions) of the elements to send.

        Args:
            buffer: of the whole bucket; the unsent part remains.
            selection: as for ``sparse.take``; this table has a part for the elements of each row.
            pending: the engine's work, or None.
        """
        length = elias_fano.coded_bytes(self.numel, buffer.numel())
        fields = [*self.fields, (torch.uint8, length)]
        packed = pending.reserve(fields) if pending else reserve(fields, buffer.device)
        values, coded = buffer.new_empty(self.numel), packed[len(self.fields)]
        positions = sparse.take(buffer, selection, values, coded, packed, pending)
        peaks = buffer if pending is None else pending.peaks
        keeps = pending is None or pending.grad is not None
        self._round(
            *(packed, values, values, 1.0, 1.0, peaks, positions, buffer),
            *(values, values, packed.padding, 0),
            ADD=False,
            KEEP=keeps,
            GUARDED=pending is not None,
            CHOSEN=True,
        )
        return packed.first(len(fields))

    def average(
        self, payloads: Sequence[Sequence[Tensor]], out: Tensor, pending: Pending | None
    ) -> None:
        """Write the mean of all workers' payloads (codes, numbers) to ``out``."""
        self._average(payloads, out, len(payloads), pending)

    def average_chosen(
        self,
        payloads: Sequence[Sequence[Tensor]],
        out: Tensor,
        selection: Selection,
        pending: Pending,
    ) -> None:
        """Write the mean of all workers' payloads of ``encode_chosen`` to ``out``."""
        values = out.new_empty(len(payloads), self.numel)
        self._average(payloads, values, 1, None)
        sent = [(mine, payload[-1]) for mine, payload in zip(values, payloads, strict=True)]
        sparse.average(sent, None, out, selection, pending)

    def _round(self, packed: Packed, *given: Tensor | float, **kind: bool) -> None:
        buffer, grad, decay, gain, peaks, positions, target, *ending = given
        launch(
            round_blocks,
            (self._tiles.shape[1],),
            *(buffer, grad, decay, gain, peaks, *self._places, positions, target),
            *(packed[0], packed[1], self._blocks, self._book, self._top, self._sign, *ending),
            **kind,
            SIGMAS=RANGE,
            **self._constants,
        )

    def _average(
        self,
        payloads: Sequence[Sequence[Tensor]],
        out: Tensor,
        together: int,
        pending: Pending | None,
    ) -> None:
        """Write means of so many payloads together, one after the other."""
        codes, codes_apart = evenly([payload[0] for payload in payloads])
        end = len(self.fields)
        numbers, numbers_apart = evenly([joined(payload[1:end]) for payload in payloads])
        flags, starts = ([numbers], self._tiles)
        if pending is not None:
            flags, starts = pending.flags, pending.segments.starts
        first, flags_apart = evenly(flags)
        launch(
            average_blocks,
            (self._tiles.shape[1], len(payloads) // together),
            *(codes, codes_apart, numbers, numbers_apart, self._blocks, together, 1 / together),
            *(out, self.numel, first, flags_apart, 0 if pending is None else len(flags), starts),
            *(*self._places, self._book),
            **self._constants,
        )

    @property
    def _places(self) -> tuple[Tensor, int, Tensor, int]:
        return self._tiles, self._tiles.shape[1], self._parts, self._parts.shape[1]


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
    table = Table([(0, 0, 500), (1, 500, 1000)], BlockCode("range", 8, 64, 2), numbers.device)
    pending, left, out = sample(numbers), numbers.clone(), numbers.clone()
    payload = table.encode(left, pending)
    table.average([payload] * 2, out, pending)
    low, high = (
        ends.view(2, -1).repeat_interleave(64, dim=1)[:, :500].reshape(-1) for ends in payload[1:3]
    )
    value = low + (high - low) * payload[0] / 255
    yield out, value
    yield left, sent - value + kept
    yield (sent - value).abs() <= (high - low) / 509, torch.ones_like(used)
    rows = tuple(Row(i, 500 * i, 500 * i + 500, 50, 100, 10) for i in range(2))
    few = Table([(0, 0, 50), (1, 50, 100)], BlockCode("bins", 2, 16, 4), numbers.device)
    chosen = Selection("chunks", rows)
    pending, left = sample(numbers), numbers.clone()
    payload = few.encode_chosen(left, chosen, pending)
    few.average_chosen([payload] * 2, out, chosen, pending)
    yield left + out, x
    yield (out[:500] != 0).sum(), used[::10].sum()


ATTEMPTS = {"blocks": _attempt}
