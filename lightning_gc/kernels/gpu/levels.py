"""Triton kernels that round parts of a bucket to levels of a block's norm."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import unpack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.message import Packed, reserve
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu import tiling
from lightning_gc.kernels.gpu.launch import end_message, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.segments import compensated, flags_of, left_of, sample
from lightning_gc.kernels.shards import LevelTable, Payloads

TILE = 2048
"""Elements of a part that one program converts."""


@triton.jit
def uniforms(key, step, groups, GROUPS: tl.constexpr):
    """Return ``(GROUPS, 8)`` numbers in [0, 1): four words each of two Philox counters."""
    counters = (groups[:, None] * 2 + tl.arange(0, 2)[None, :]).to(tl.uint32)
    zero = tl.zeros([GROUPS, 2], tl.uint32)
    a, b, c, d = tl.philox(key, counters, (zero + step).to(tl.uint32), zero, zero)
    a = tl.random.uint_to_uniform_float(a)
    b = tl.random.uint_to_uniform_float(b)
    c = tl.random.uint_to_uniform_float(c)
    d = tl.random.uint_to_uniform_float(d)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (GROUPS, 8))  # a b c d, twice


@triton.jit
def level_of(x, norm, u, BITS: tl.constexpr):
    """Return the level, a whole number in float32 with the sign of x; NaN stays."""
    # Older versions of Triton flush subnormal numbers to zero in divisions: scale them up.
    larger = tl.where(norm < 2.0**-64, 2.0**96, 1.0)
    ratio = tl.div_rn(x * larger, tl.where(norm > 0, norm, 1.0) * larger)
    steps = tl.zeros_like(x) + ((1 << (BITS - 1)) - 1)
    level = tl.floor(tl.abs(ratio) * steps + u)
    level = tl.where(level > steps, steps, level)
    sign = ratio.to(tl.int32, bitcast=True) & -2147483648  # of -0.0 too
    return (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def value_of(level, norm, BITS: tl.constexpr):
    """Return what a level means."""
    steps = tl.zeros_like(level) + ((1 << (BITS - 1)) - 1)
    return tl.div_rn(level, steps) * norm


@triton.jit
def code_of(level, BITS: tl.constexpr):
    """Return the codes of levels, int32; 0 for NaN."""
    steps = tl.zeros_like(level) + ((1 << (BITS - 1)) - 1)
    return tl.where(level == level, level + steps, 0.0).to(tl.int32)


@triton.jit
def store_codes(packed, code, groups, at, numel, BITS: tl.constexpr):
    """Pack codes, ``(groups, 8)`` int32, into the bytes of a tensor of ``numel`` codes."""
    inside = at < numel
    code = tl.where(inside, code, 0)
    WHOLE: tl.constexpr = BITS // 8
    REST: tl.constexpr = BITS % 8
    for i in tl.static_range(WHOLE):
        tl.store(packed + i * numel + at, ((code >> (8 * i)) & 255).to(tl.uint8), mask=inside)
    if REST > 0:
        lane = tl.arange(0, 8)[None, :]
        plane = packed + WHOLE * numel
        word = tl.sum((code >> (8 * WHOLE)).to(tl.int64) << (REST * lane), axis=1)
        # Not numel * REST: of hundreds of millions of elements that is more than int32 holds.
        length = numel // 8 * REST + (numel % 8 * REST + 7) // 8
        for i in tl.static_range(REST):
            byte = groups * REST + i
            tl.store(plane + byte, ((word >> (8 * i)) & 255).to(tl.uint8), mask=byte < length)


@triton.jit
def load_codes(packed, groups, at, numel, BITS: tl.constexpr):
    """Return codes, ``(groups, 8)`` int32."""
    WHOLE: tl.constexpr = BITS // 8
    REST: tl.constexpr = BITS % 8
    code = tl.zeros_like(at)
    for i in tl.static_range(WHOLE):
        byte = tl.load(packed + i * numel + at, mask=at < numel, other=0)
        code |= byte.to(tl.int32) << (8 * i)
    if REST > 0:
        lane = tl.arange(0, 8)[None, :]
        plane = packed + WHOLE * numel
        length = numel // 8 * REST + (numel % 8 * REST + 7) // 8
        word = tl.zeros_like(groups).to(tl.int64)
        for i in tl.static_range(REST):
            index = groups * REST + i
            byte = tl.load(plane + index, mask=index < length, other=0)
            word |= byte.to(tl.int64) << (8 * i)
        rest = (word[:, None] >> (REST * lane)) & ((1 << REST) - 1)
        code |= rest.to(tl.int32) << (8 * WHOLE)
    return code


@triton.jit
def load_values(packed, norm, groups, at, numel, BITS: tl.constexpr):
    """Return what codes mean, ``(groups, 8)``; NaN where no encoder makes the code."""
    code = load_codes(packed, groups, at, numel, BITS)
    steps: tl.constexpr = (1 << (BITS - 1)) - 1
    value = value_of((code - steps).to(tl.float32), norm, BITS)
    return tl.where(code > 2 * steps, float("nan"), value)


@kernel()
def raise_peaks(
    buffer, grad, decay, gain, peaks,
    tiles, parts,
    block_size, most, most_apart,
    ADD: tl.constexpr, LARGE: tl.constexpr, MEAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Raise ``most`` of each block to the bits of its largest magnitude."""
    part, local, start, there, _ = tiling.tile_of(tiles, parts, tl.program_id(0), MEAN)
    at = local + tl.arange(0, TILE)
    inside = at < there
    found = magnitude_bits(compensated(buffer, grad, start + at, inside, decay, gain, ADD))
    if ADD:
        found = tl.where(tiling.is_idle(peaks, parts, part), 0, found)
    first = local // block_size
    most += tiling.field_at(parts, part, tiling.BLOCKS, most_apart)
    if LARGE:  # a tile has elements of two blocks at most
        end = (first + 1) * block_size
        most += first
        tl.atomic_max(most, tl.max(tl.where(at < end, found, 0), axis=0))
        if local + TILE > end:
            tl.atomic_max(most + 1, tl.max(tl.where(at < end, 0, found), axis=0), mask=end < there)
    else:
        tl.atomic_max(most + at // block_size, found, mask=inside)


@kernel()
def round_tiles(
    buffer, grad, decay, gain, peaks,
    tiles, parts,
    keys, step,
    block_size, most, most_apart,
    codes, codes_apart, norms, messages,
    flag, sent_flag, padding, length,
    own,
    ADD: tl.constexpr, KEEP: tl.constexpr, MEAN: tl.constexpr, NEAREST: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round and pack a tile. Its norms are found here if BLOCK is not 0, else they are ``most``.

    In the shard ``own`` numbers that are not finite stay for ``book``.
    """
    tile = tl.program_id(0)
    if tile < messages:
        end_message(flag, sent_flag, padding + tile.to(tl.int64) * codes_apart, length)
    part, local, start, there, numel = tiling.tile_of(tiles, parts, tile, MEAN)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    whole = compensated(buffer, grad, start + at, at < there, decay, gain, ADD)
    x, idle = whole, part < 0
    if ADD:
        idle = tiling.is_idle(peaks, parts, part)
        x = tl.where(idle, 0.0, whole)
    norms += tiling.field_at(parts, part, tiling.BLOCKS, codes_apart // 4)
    if BLOCK > 0:
        ROWS: tl.constexpr = TILE // BLOCK
        # Magnitudes are ordered like their bits, NaN last.
        found = tl.max(tl.reshape(magnitude_bits(x), (ROWS, BLOCK)), axis=1)
        found = found.to(tl.float32, bitcast=True)
        first = local + tl.arange(0, ROWS) * BLOCK
        tl.store(norms + first // BLOCK, found, mask=first < numel)
        norm = tl.reshape(tl.broadcast_to(found[:, None], (ROWS, BLOCK)), (GROUPS, 8))
    else:
        most += tiling.field_at(parts, part, tiling.BLOCKS, most_apart)
        bits = tl.load(most + at // block_size, mask=at < numel, other=0)
        norm = bits.to(tl.float32, bitcast=True)
        tl.store(norms + at // block_size, norm, mask=(at < numel) & (at % block_size == 0))
    if NEAREST:
        u = tl.full([GROUPS, 8], 0.5, tl.float32)
    else:
        u = uniforms(tl.load(keys + part), step, groups, GROUPS)
    level = level_of(x, norm, u, BITS)
    codes += tiling.field_at(parts, part, tiling.CODES, codes_apart)
    store_codes(codes, code_of(level, BITS), groups, at, numel, BITS)
    if KEEP:
        mine = tiling.cell(parts, part, tiling.SHARD) == own
        left = left_of(x, value_of(level, norm, BITS), whole, idle, mine, ADD)
        tl.store(buffer + start + at, left, mask=at < there)


@triton.jit
def sum_of(
    total, codes, codes_apart, norms, norms_apart, workers, share, groups, at, numel, block_size,
    BITS: tl.constexpr,
):  # fmt: skip
    """Add to ``total``, in workers' order, ``share`` times what each has sent."""
    weight = tl.zeros_like(total) + share
    sender = 0
    while sender < workers:
        norm = tl.load(norms + at // block_size, mask=at < numel, other=0.0)
        value = load_values(codes, norm, groups, at, numel, BITS)
        total = tl.fma(value, weight, total)  # as torch adds with a factor
        codes += codes_apart
        norms += norms_apart
        sender += 1
    return total


@kernel()
def average_tiles(
    codes, codes_apart, codes_shard,
    norms, norms_apart, norms_shard,
    workers, share, out,
    flags, flags_apart, senders,
    tiles, parts,
    block_size,
    FRESH: tl.constexpr, MEAN: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a tile of the mean, and add the flags to the first element of its parameter.

    Unless FRESH, add the tile to ``out``.
    """
    part, local, start, there, numel = tiling.tile_of(tiles, parts, tl.program_id(0), MEAN)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    codes += tiling.field_at(parts, part, tiling.CODES, codes_shard)
    norms += tiling.field_at(parts, part, tiling.BLOCKS, norms_shard)
    here = start + at
    total = tl.zeros_like(at).to(tl.float32)
    if not FRESH:
        total = tl.load(out + here, mask=at < there, other=0.0)
    total = sum_of(
        total, codes, codes_apart, norms, norms_apart, workers, share, groups, at, numel,
        block_size, BITS,
    )  # fmt: skip
    total = tiling.flagged(total, here, flags, flags_apart, senders, parts, part)
    tl.store(out + here, total, mask=at < there)


class Table(LevelTable):
    """Encodes and decodes parts of a bucket; see ``kernels.shards.LevelTable``.

    Philox-4×32-10 draws the numbers: element i of a shard gets word ``i mod 4`` of counter
    ``(i // 4, step, 0, 0)``, under a key of worker, phase and name.
    """

    @functools.cached_property
    def _tiles(self) -> tiling.Tiles:
        return tiling.Tiles(self.layout, TILE, self.device)

    def quantise(self, buffer: Tensor, norms: Tensor, noise: torch.Generator | None) -> Tensor:
        packed, keys = reserve(self.fields, self.device), None
        if noise is not None:
            keys = torch.full((1,), noise.initial_seed(), dtype=torch.int64, device=self.device)
        alone = Bucket(buffer, {})
        self._encode([packed], buffer, alone, None, keys, norms.view(torch.int32))
        return packed[0]

    def _encode(
        self,
        packed: Sequence[Packed],
        buffer: Tensor,
        bucket: Bucket,
        mine: int | None,
        keys: Tensor | None = None,
        most: Tensor | None = None,
    ) -> None:
        """Do as the base class, perhaps with known keys and the bits of known norms."""
        adds, keeps, given = tiling.source(buffer, bucket, mine)
        grid, *table = self._tiles.table(mine)
        size, apart = self.block_size, self.layout.blocks
        # A tile consists of complete blocks, or their norms are found before.
        block = size if most is None and size <= TILE and TILE % size == 0 else 0
        if most is None and not block:
            words = apart * self.layout.shards
            if bucket.pending is not None:
                most = bucket.pending.work.take(words)
            else:
                most = torch.zeros(words, dtype=torch.int32, device=buffer.device)
            launch(
                raise_peaks,
                grid,
                *(*given, *table, size, most, apart),
                ADD=adds,
                LARGE=size >= TILE,
                MEAN=mine is not None,
                TILE=TILE,
            )
        if keys is None:
            keys = self._tiles.parts if self.nearest else self._tiles.keys(bucket)
        found = self._tiles.of if most is None else most
        launch(
            round_tiles,
            grid,
            *(*given, *table, keys, bucket.step, size, found, apart),
            *tiling.target(packed, bucket),
            ADD=adds,
            KEEP=keeps,
            MEAN=mine is not None,
            NEAREST=self.nearest,
            BITS=self.bits,
            BLOCK=block,
            TILE=TILE,
        )

    def average(
        self,
        payloads: Payloads,
        out: Tensor,
        pending: Pending | None,
        mine: int | None = None,
        scale: float | None = None,
    ) -> bool:
        """Do as the base class; or with ``scale`` add that times the only payload."""
        grid, *table = self._tiles.table(mine)
        *read, share = tiling.arrivals(self, payloads, mine)
        launch(
            average_tiles,
            grid,
            *(*read, share if scale is None else scale, out, *flags_of(pending, out), *table),
            self.block_size,
            FRESH=scale is None,
            MEAN=mine is not None,
            BITS=self.bits,
            TILE=TILE,
        )
        return True

    def add(self, payload: Payload, out: Tensor, scale: float) -> bool:
        return self.average([payload], out, None, scale=float(scale))


def _rounded(
    levels: Tensor, exact: Tensor, s: int, shift: float
) -> Iterator[tuple[Tensor, Tensor]]:
    rounded = exact.abs() + shift
    sure = (rounded.frac() - 0.5).abs() < 0.499  # not where the next bit decides
    yield levels * sure, rounded.floor().clamp(max=s).copysign(exact).int() * sure


def _buckets(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    sent = 0.5 * numbers + numbers.flip(0)
    sent[500:] = 0  # of an idle parameter
    kept = 0.5 * numbers[500:] + numbers.flip(0)[500:]
    for bits, size, nearest in ((5, 64, False), (8, 100, True), (12, 2 * TILE, True)):
        parts = [("a", 0, 0, 500), ("b", 1, 500, 1000)]
        table = Table(parts, bits, size, nearest, numbers.device)
        shapes = {name: (500,) for name, *_ in parts}
        bucket = Bucket(numbers, shapes, pending=sample(numbers))
        left, out, s = numbers.clone(), numbers.clone(), 2 ** (bits - 1) - 1
        ((codes, norms),) = table.encode(left, bucket)
        padded = torch.nn.functional.pad(sent.view(2, 500), (0, -500 % size)).abs()
        yield norms, padded.view(-1, min(size, padded.shape[1])).amax(1)
        wide = norms.view(2, -1).repeat_interleave(size, dim=1)[:, :500].reshape(-1)
        halves = codes.view(2, -1)
        levels = torch.cat([unpack(half, bits, 500, torch.int32) - s for half in halves])
        exact = sent / wide.where(wide > 0, 1.0) * s
        value = levels / s * wide
        yield left, torch.cat([(sent - value)[:500], kept])
        if nearest:
            yield from _rounded(levels, exact, s, 0.5)
        yield (levels - exact).abs() < 1.001, torch.ones_like(levels, dtype=torch.bool)
        table.average([(codes, norms), (codes, norms)], out, bucket.pending)
        yield out, value


def _alone(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Round by given norms, and add what is sent."""
    noise = torch.Generator(numbers.device).manual_seed(0)
    for bits, size, draw in ((5, 64, noise), (12, 100, None)):
        table = Table([("a", 0, 0, 1000)], bits, size, draw is None, numbers.device)
        ((codes, norms),) = table.encode(numbers.clone(), Bucket(numbers, {"a": (1000,)}))
        left, out = numbers.clone(), numbers.clone()
        packed = table.quantise(left, norms, draw)
        if draw is None:
            yield packed, codes
        table.add((packed, norms), out, -1.0)
        yield out, left
        table.add((packed.fill_(255), norms), out, 1.0)  # codes that no encoder makes
        yield out.isnan(), torch.ones_like(out, dtype=torch.bool)


def _shards(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    table = Table([("a", 0, 0, 500), ("b", 1, 500, 1000)], 5, 64, True, numbers.device, 2)
    yield from tiling.attempt_shards(numbers, table)


ATTEMPTS = {"levels": _buckets, "alone": _alone, "shards": _shards}
