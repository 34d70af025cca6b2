"""Triton kernels that round to levels of a block's norm: of one tensor, and of a whole bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes, unpack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed, evenly
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, magnitude_bits
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
from lightning_gc.kernels.segments import table_of

GROUPS = 128
"""Groups of eight codes that one program of ``quantise`` or ``dequantise`` converts."""
TILE = 2048
"""Elements of a parameter that one program of a bucket's kernels converts."""


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


@kernel("buffer", "numel")
def round_and_pack(
    buffer,
    norms,
    noise,
    packed,
    seed,
    numel,
    block_size,
    DRAW: tl.constexpr,
    NEAREST: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Round and pack ``8 · GROUPS`` elements."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    inside = at < numel
    x = tl.load(buffer + at, mask=inside, other=0.0)
    norm = tl.load(norms + at // block_size, mask=inside, other=0.0)
    if NEAREST:
        u = tl.full([GROUPS, 8], 0.5, tl.float32)
    elif DRAW:
        u = uniforms(seed, 0, groups, GROUPS)
    else:
        u = tl.load(noise + at, mask=inside, other=0.0)
    level = level_of(x, norm, u, BITS)
    tl.store(buffer + at, x - value_of(level, norm, BITS), mask=inside)
    store_codes(packed, code_of(level, BITS), groups, at, numel, BITS)


def quantise(
    buffer: Tensor,
    norms: Tensor,
    block_size: int,
    bits: int,
    noise: Tensor | torch.Generator | None,
) -> Tensor:
    """Return the packed codes; see ``kernels.quantise``."""
    numel = buffer.numel()
    packed = torch.empty(packed_bytes(numel, bits), dtype=torch.uint8, device=buffer.device)
    draw = isinstance(noise, torch.Generator)
    seed = noise.initial_seed() if isinstance(noise, torch.Generator) else 0
    numbers = noise if isinstance(noise, Tensor) else buffer  # unused
    launch(
        round_and_pack,
        (triton.cdiv(numel, 8 * GROUPS),),
        *(buffer, norms, numbers, packed, seed, numel, block_size),
        DRAW=draw,
        NEAREST=noise is None,
        BITS=bits,
        GROUPS=GROUPS,
    )
    return packed


@kernel("out", "numel")
def unpack_and_add(
    packed, norms, out, scale, numel, block_size, BITS: tl.constexpr, GROUPS: tl.constexpr
):
    """Add ``8 · GROUPS`` elements."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    inside = at < numel
    norm = tl.load(norms + at // block_size, mask=inside, other=0.0)
    value = load_values(packed, norm, groups, at, numel, BITS)
    kept = tl.load(out + at, mask=inside, other=0.0)
    # One rounding for product and sum, as in torch's add with alpha.
    weight = tl.zeros([GROUPS, 8], tl.float32) + scale
    tl.store(out + at, tl.fma(value, weight, kept), mask=inside)


def dequantise(
    packed: Tensor, norms: Tensor, block_size: int, bits: int, out: Tensor, scale: float
) -> None:
    """Add the values of the codes; see ``kernels.dequantise``."""
    numel = out.numel()
    launch(
        unpack_and_add,
        (triton.cdiv(numel, 8 * GROUPS),),
        *(packed, norms, out, float(scale), numel, block_size),
        BITS=bits,
        GROUPS=GROUPS,
    )


PLACE, BEGIN, START, THERE, NUMEL, CODES, NORMS, SHARD, IN_ROW = map(tl.constexpr, range(9))
"""Rows of ``Layout.parts``."""


@triton.jit
def cell(parts, number, part, ROW: tl.constexpr):
    """Return an entry of ``Table.parts`` that fits into 32 bits."""
    return tl.load(parts + ROW * number + part).to(tl.int32)


@triton.jit
def field_at(parts, number, part, ROW: tl.constexpr, apart):
    """Return where a part's codes or norms begin; messages of shards are ``apart``."""
    shard = tl.load(parts + SHARD * number + part)
    return tl.load(parts + ROW * number + part) + shard * apart


@triton.jit
def place_of(parts, number, part, MEAN: tl.constexpr):
    """Return a part's first element and how many there are: in the bucket, or in a shard's mean."""
    if MEAN:
        start, there = cell(parts, number, part, IN_ROW), cell(parts, number, part, NUMEL)
    else:
        start, there = cell(parts, number, part, START), cell(parts, number, part, THERE)
    return start, there


@kernel()
def raise_peaks(
    buffer,
    grad,
    decay,
    gain,
    peaks,
    tiles,
    count,
    parts,
    number,
    block_size,
    most,
    most_apart,
    ADD: tl.constexpr,
    LARGE: tl.constexpr,
    MEAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise ``most`` of each block to the bits of its largest magnitude."""
    tile = tl.program_id(0)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    start, there = place_of(parts, number, part, MEAN)
    at = local + tl.arange(0, TILE)
    inside = at < there
    found = magnitude_bits(compensated(buffer, grad, start + at, inside, decay, gain, ADD))
    if ADD:
        found = tl.where(tl.load(peaks + cell(parts, number, part, PLACE)) == 0.0, 0, found)  # idle
    first = local // block_size
    most += field_at(parts, number, part, NORMS, most_apart)
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
    buffer,
    grad,
    decay,
    gain,
    peaks,
    tiles,
    count,
    parts,
    number,
    keys,
    step,
    block_size,
    most,
    most_apart,
    codes,
    codes_apart,
    norms,
    norms_apart,
    messages,
    flag,
    sent_flag,
    padding,
    length,
    own,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    MEAN: tl.constexpr,
    NEAREST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round and pack a tile. Its norms are found here if BLOCK is not 0, else they are ``most``.

    In the shard ``own`` numbers that are not finite stay for ``book``.
    """
    tile = tl.program_id(0)
    if tile < messages:
        end_message(flag, sent_flag, padding + tile.to(tl.int64) * codes_apart, length)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    start, there = place_of(parts, number, part, MEAN)
    numel = cell(parts, number, part, NUMEL)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    whole = compensated(buffer, grad, start + at, at < there, decay, gain, ADD)
    x = whole
    if ADD:
        idle = tl.load(peaks + cell(parts, number, part, PLACE)) == 0.0
        x = tl.where(idle, 0.0, whole)
    norms += field_at(parts, number, part, NORMS, norms_apart)
    if BLOCK > 0:
        BLOCKS: tl.constexpr = TILE // BLOCK
        # Magnitudes are ordered like their bits, NaN last.
        found = tl.max(tl.reshape(magnitude_bits(x), (BLOCKS, BLOCK)), axis=1)
        found = found.to(tl.float32, bitcast=True)
        first = local + tl.arange(0, BLOCKS) * BLOCK
        tl.store(norms + first // BLOCK, found, mask=first < numel)
        norm = tl.reshape(tl.broadcast_to(found[:, None], (BLOCKS, BLOCK)), (GROUPS, 8))
    else:
        most += field_at(parts, number, part, NORMS, most_apart)
        bits = tl.load(most + at // block_size, mask=at < numel, other=0)
        norm = bits.to(tl.float32, bitcast=True)
        tl.store(norms + at // block_size, norm, mask=(at < numel) & (at % block_size == 0))
    if NEAREST:
        u = tl.full([GROUPS, 8], 0.5, tl.float32)
    else:
        u = uniforms(tl.load(keys + part), step, groups, GROUPS)
    level = level_of(x, norm, u, BITS)
    codes += field_at(parts, number, part, CODES, codes_apart)
    store_codes(codes, code_of(level, BITS), groups, at, numel, BITS)
    if KEEP:
        left = x - value_of(level, norm, BITS)
        if ADD:
            if cell(parts, number, part, SHARD) != own:
                left = tl.where(is_finite(left), left, 0.0)
            left = tl.where(idle, tl.where(is_finite(whole), whole, 0.0), left)
        tl.store(buffer + start + at, left, mask=at < there)


@triton.jit
def mean_of(
    codes, codes_apart, norms, norms_apart, workers, share, groups, at, numel, block_size,
    BITS: tl.constexpr,
):  # fmt: skip
    """Return the sum over workers, in their order, of ``share`` times what each has sent."""
    total = tl.zeros_like(at).to(tl.float32)
    weight = total + share
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
    codes,
    codes_apart,
    codes_shard,
    norms,
    norms_apart,
    norms_shard,
    workers,
    share,
    out,
    flags,
    flags_apart,
    senders,
    tiles,
    count,
    parts,
    number,
    block_size,
    MEAN: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a tile of the mean, and add the flags to the first element of its parameter."""
    tile = tl.program_id(0)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    begin = cell(parts, number, part, BEGIN)
    start, there = place_of(parts, number, part, MEAN)
    numel = cell(parts, number, part, NUMEL)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    codes += field_at(parts, number, part, CODES, codes_shard)
    norms += field_at(parts, number, part, NORMS, norms_shard)
    total = mean_of(
        codes, codes_apart, norms, norms_apart, workers, share, groups, at, numel, block_size, BITS
    )
    here = start + at
    if senders > 0:
        total = tl.where(here == begin, total + arrived(flags, flags_apart, senders), total)
    tl.store(out + here, total, mask=at < there)


class Layout:
    """The parts of a bucket, or W shards of each, that share payloads of codes and numbers.

    Args:
        parts: name, place among the bucket's parameters, first element and end of each part.
        bits: of a code.
        block_size: elements that share a norm, or other numbers.
        tile: elements that one program converts.
        device: of the bucket.
        shards: W, or 1. A payload holds one shard of each part.

    Attributes:
        names: of the columns of ``parts``, for random numbers.
        codes, blocks: bytes of codes in a payload, and blocks.
        parts: by column a shard of a part: the parameter's place and first element, the shard's
            first element, how many elements lie there, how many are encoded, where its codes and
            norms begin in the payload, the shard's number, and where it begins in a row of shards,
            ``(9, n)`` int64.
        tiles: column of ``parts`` and first element in the shard of each tile, ``(2, m)`` int32.
        row: elements of a shard of all parts.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int, int, int]],
        bits: int,
        block_size: int,
        tile: int,
        device: torch.device,
        shards: int,
    ) -> None:
        self.shards, self.names, rows = shards, list[str](), list[tuple[int, ...]]()
        tiles, self._ends = list[tuple[int, int]](), [0]
        self._places = list[list[tuple[int, int, int, int]]]()
        self._booked: dict[int, Tensor] = {}  # by shard
        codes = blocks = self.row = 0
        for shard in range(shards):
            codes = blocks = self.row = 0
            self._places.append([])
            for name, place, start, stop in parts:
                size = -(-(stop - start) // shards)
                first = min(start + shard * size, stop)
                there = min(size, stop - first)
                rows.append((place, start, first, there, size, codes, blocks, shard, self.row))
                self._places[-1].append((place, first, first + there, self.row))
                tiles += [(len(self.names), local) for local in range(0, size, tile)]
                self.names.append(name if shards == 1 else f"{name}#{shard}")
                codes, blocks = codes + packed_bytes(size, bits), blocks - -size // block_size
                self.row += size
            self._ends.append(len(tiles))
        self.codes, self.blocks = codes, blocks
        self.parts = torch.tensor(rows, dtype=torch.int64, device=device).t().contiguous()
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device).t().contiguous()

    def table(self, shard: int | None = None) -> tuple[tuple[int], Tensor, int, Tensor, int]:
        """Return a grid of all tiles, or of a shard's, and the kernels' arguments for it."""
        start, stop = (0, self._ends[-1]) if shard is None else self._ends[shard : shard + 2]
        tiles = self.tiles.view(-1)[start:]
        return (stop - start,), tiles, self.tiles.shape[1], self.parts, self.parts.shape[1]

    def book(self, buffer: Tensor, mean: Tensor, mine: int, pending: Pending | None) -> None:
        """Add W times what is left of the mean of shard ``mine``, if anyone keeps errors."""
        if pending is not None and pending.grad is None:
            return
        if mine not in self._booked:
            self._booked[mine] = table_of(self._places[mine], buffer.device)
        table = self._booked[mine]
        book(buffer, mean, self.shards, ((table.shape[1],), table, table.shape[1]), pending)


class Table:
    """Encodes and decodes the parts of a bucket, or W shards of each, in levels of their norms.

    Args:
        parts: as for ``Layout``.
        bits: of a code.
        block_size: elements that share a norm.
        nearest: whether elements are rounded to the nearest level, or at random.
        device: of the bucket.
        shards: W, or 1.

    Attributes:
        fields: dtype and length of codes and norms in a payload.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int, int, int]],
        bits: int,
        block_size: int,
        nearest: bool,
        device: torch.device,
        shards: int = 1,
    ) -> None:
        self.bits, self.block_size, self.nearest = bits, block_size, nearest
        self.layout = Layout(parts, bits, block_size, TILE, device, shards)
        self.fields = [(torch.uint8, self.layout.codes), (torch.float32, self.layout.blocks)]
        self._keys: dict[tuple[int, int, int], Tensor] = {}
        # A tile consists of complete blocks, or their norms are found before.
        self._block = block_size if block_size <= TILE and TILE % block_size == 0 else 0

    def encode(self, buffer: Tensor, bucket: Bucket) -> list[Packed]:
        """Return each shard's payload (codes, norms), as ``core.segments.Pending`` says.

        The numbers are those of Philox-4×32-10: element i of a shard gets word ``i mod 4`` of
        counter ``(i // 4, step, 0, 0)``, under a key of worker, phase and name.
        """
        shards = self.layout.shards
        packed, flagged = reserved(self.fields, buffer, bucket.pending, shards)
        own = bucket.worker if shards > 1 else -1
        self._round(packed, buffer, bucket, bucket.pending, flagged, own)
        return [payload.first(2) for payload in packed]

    def average(
        self, payloads: Sequence[Sequence[Tensor]], out: Tensor, pending: Pending | None
    ) -> None:
        """Write the mean of all workers' payloads, or all shards' payloads, to ``out``."""
        self._average(payloads, out, [] if pending is None else pending.flags)

    def again(self, payloads: Sequence[Sequence[Tensor]], buffer: Tensor, bucket: Bucket) -> Packed:
        """Return the payload of the mean of this worker's shard, and book what it loses.

        Args:
            payloads: of this shard, from all workers.
            buffer: of the whole bucket; W times the loss is added to the shard.
            bucket: in its second phase.
        """
        pending, mine = bucket.pending, bucket.worker
        mean = buffer.new_empty(self.layout.row)
        self._average(payloads, mean, [], mine)
        packed, flagged = reserved(self.fields, buffer, pending)
        self._round(packed, mean, bucket, None, flagged, -1, mine)
        self.layout.book(buffer, mean, mine, pending)
        return packed[0].first(2)

    def _keys_of(self, bucket: Bucket) -> Tensor:
        """Return the Philox key of each column, ``(n,)`` int64."""
        if self.nearest:
            return self.layout.parts
        worker = bucket.seed, bucket.worker, bucket.phase
        if worker not in self._keys:
            keys = [bucket.key(name) for name in self.layout.names]
            device = self.layout.parts.device
            self._keys[worker] = torch.tensor(keys, dtype=torch.int64, device=device)
        return self._keys[worker]

    def _round(
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
        adds = pending is not None and pending.grad is not None
        weighted = given(buffer, pending)
        grid, *table = self.layout.table(mean_of)
        most, apart, shared = self.layout.tiles, self.layout.blocks, mean_of is not None
        if not self._block:
            words = apart * self.layout.shards
            if bucket.pending is not None:
                most = bucket.pending.work.take(words)
            else:
                most = torch.zeros(words, dtype=torch.int32, device=buffer.device)
            launch(
                raise_peaks,
                grid,
                *(*weighted, *table, self.block_size, most, apart),
                ADD=adds,
                LARGE=self.block_size >= TILE,
                MEAN=shared,
                TILE=TILE,
            )
        nbytes = 0 if shared else packed[0].layout.nbytes
        launch(
            round_tiles,
            grid,
            *(*weighted, *table, self._keys_of(bucket), bucket.step, self.block_size, most, apart),
            *(packed[0][0], nbytes, packed[0][1], nbytes // 4, len(packed)),
            *(*ending(packed[0], flagged), own),
            ADD=adds,
            KEEP=adds or pending is None,
            MEAN=shared,
            NEAREST=self.nearest,
            BITS=self.bits,
            BLOCK=self._block,
            TILE=TILE,
        )

    def _average(
        self,
        payloads: Sequence[Sequence[Tensor]],
        out: Tensor,
        flags: Sequence[Tensor],
        mean_of: int | None = None,
    ) -> None:
        """Write all parts' means, or the mean of a shard as a row."""
        codes, codes_apart = evenly([payload[0] for payload in payloads])
        norms, norms_apart = evenly([payload[1] for payload in payloads])
        workers, shard = len(payloads), (0, 0)
        if self.layout.shards > 1 and mean_of is None:  # a payload for each shard
            workers, shard = 1, (codes_apart, norms_apart)
        first, flags_apart = evenly(flags or [norms])
        grid, *table = self.layout.table(mean_of)
        launch(
            average_tiles,
            grid,
            *(codes, codes_apart, shard[0], norms, norms_apart, shard[1], workers, 1 / workers),
            *(out, first, flags_apart, len(flags), *table, self.block_size),
            MEAN=mean_of is not None,
            BITS=self.bits,
            TILE=TILE,
        )


_NORM_BLOCK = 64
_BITS = (5, 8, 12)  # codes with a rest only, with whole bytes only, with both


def _quantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    norms, wide = _norms(numbers)
    random = torch.Generator(numbers.device).manual_seed(0)
    quarter = numbers.new_full((len(norms) * _NORM_BLOCK,), 0.25)
    for bits, noise, shift in zip(_BITS, (random, None, quarter), (None, 0.5, 0.25), strict=True):
        left, s = numbers.clone(), 2 ** (bits - 1) - 1
        packed = quantise(left, norms, _NORM_BLOCK, bits, noise)
        levels, exact = unpack(packed, bits, 1000, torch.int32) - s, numbers / wide * s
        yield left, numbers - levels / s * wide
        if shift is None:  # the kernel draws its own numbers, so only bounds are known
            yield (levels - exact).abs() < 1.001, torch.ones_like(levels, dtype=torch.bool)
            continue
        yield from _rounded(levels, exact, s, shift)


def _rounded(
    levels: Tensor, exact: Tensor, s: int, shift: float
) -> Iterator[tuple[Tensor, Tensor]]:
    rounded = exact.abs() + shift
    sure = (rounded.frac() - 0.5).abs() < 0.499  # not where the next bit decides
    yield levels * sure, rounded.floor().clamp(max=s).copysign(exact).int() * sure


def _dequantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    norms, wide = _norms(numbers)
    for bits in _BITS:
        s = 2 ** (bits - 1) - 1
        packed = torch.arange(1000 * bits // 8, device=numbers.device).mul(37).to(torch.uint8)
        codes = unpack(packed, bits, 1000, torch.int32)
        wanted = numbers + 0.5 * wide * (codes - s) / s
        out = numbers.clone()
        dequantise(packed, norms, _NORM_BLOCK, bits, out, 0.5)
        known = codes <= 2 * s
        yield out.masked_fill(~known, 0), wanted.masked_fill(~known, 0)
        yield out.isnan(), ~known


def _norms(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of each block, and for every element the norm of its block."""
    blocks = torch.nn.functional.pad(numbers, (0, -numbers.numel() % _NORM_BLOCK)).view(
        -1, _NORM_BLOCK
    )
    norms = blocks.abs().amax(1)
    return norms, norms.repeat_interleave(_NORM_BLOCK)[: numbers.numel()]


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


def _shards(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    table = Table([("a", 0, 0, 500), ("b", 1, 500, 1000)], 5, 64, True, numbers.device, 2)
    yield from attempt_shards(numbers, table)


ATTEMPTS = {"quantise": _quantise, "dequantise": _dequantise, "levels": _buckets, "shards": _shards}
