"""Triton kernels that round to levels of a block's norm: of one tensor, and of a whole bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes, unpack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.message import Packed, evenly, reserve
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.segments import arrived, compensated, sample

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
def store_codes(packed, level, groups, at, numel, BITS: tl.constexpr):
    """Pack the codes of levels, ``(groups, 8)``, into the bytes of a tensor of ``numel`` codes."""
    steps = tl.zeros_like(level) + ((1 << (BITS - 1)) - 1)
    inside = at < numel
    code = tl.where(inside & (level == level), level + steps, 0.0).to(tl.int32)
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
def load_values(packed, norm, groups, at, numel, BITS: tl.constexpr):
    """Return what codes mean, ``(groups, 8)``; NaN where no encoder makes the code."""
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
    store_codes(packed, level, groups, at, numel, BITS)


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


PLACE, BEGIN, START, THERE, NUMEL, CODES, NORMS = (tl.constexpr(i) for i in range(7))
"""Rows of ``Table.parts``."""


@triton.jit
def cell(parts, number, part, ROW: tl.constexpr):
    """Return an entry of ``Table.parts`` that is the number of an element."""
    return tl.load(parts + ROW * number + part).to(tl.int32)


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
    ADD: tl.constexpr,
    LARGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise ``most`` of each block to the bits of its largest magnitude."""
    tile = tl.program_id(0)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    start = cell(parts, number, part, START)
    there = cell(parts, number, part, THERE)
    at = local + tl.arange(0, TILE)
    inside = at < there
    found = magnitude_bits(compensated(buffer, grad, start + at, inside, decay, gain, ADD))
    if ADD:
        found = tl.where(tl.load(peaks + cell(parts, number, part, PLACE)) == 0.0, 0, found)  # idle
    first = local // block_size
    if LARGE:  # a tile has elements of two blocks at most
        end = (first + 1) * block_size
        most += tl.load(parts + NORMS * number + part) + first
        tl.atomic_max(most, tl.max(tl.where(at < end, found, 0), axis=0))
        if local + TILE > end:
            tl.atomic_max(most + 1, tl.max(tl.where(at < end, 0, found), axis=0), mask=end < there)
    else:
        most += tl.load(parts + NORMS * number + part)
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
    codes,
    norms,
    flag,
    sent_flag,
    padding,
    length,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    NEAREST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round and pack a tile. Its norms are found here if BLOCK is not 0, else they are ``most``."""
    tile = tl.program_id(0)
    if tile == 0:
        end_message(flag, sent_flag, padding, length)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    start = cell(parts, number, part, START)
    there = cell(parts, number, part, THERE)
    numel = cell(parts, number, part, NUMEL)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    whole = compensated(buffer, grad, start + at, at < there, decay, gain, ADD)
    x = whole
    if ADD:
        idle = tl.load(peaks + cell(parts, number, part, PLACE)) == 0.0
        x = tl.where(idle, 0.0, whole)
    norm_at = tl.load(parts + NORMS * number + part)
    norms += norm_at
    if BLOCK > 0:
        BLOCKS: tl.constexpr = TILE // BLOCK
        # Magnitudes are ordered like their bits, NaN last.
        found = tl.max(tl.reshape(magnitude_bits(x), (BLOCKS, BLOCK)), axis=1)
        found = found.to(tl.float32, bitcast=True)
        first = local + tl.arange(0, BLOCKS) * BLOCK
        tl.store(norms + first // BLOCK, found, mask=first < numel)
        norm = tl.reshape(tl.broadcast_to(found[:, None], (BLOCKS, BLOCK)), (GROUPS, 8))
    else:
        bits = tl.load(most + norm_at + at // block_size, mask=at < numel, other=0)
        norm = bits.to(tl.float32, bitcast=True)
        tl.store(norms + at // block_size, norm, mask=(at < numel) & (at % block_size == 0))
    if NEAREST:
        u = tl.full([GROUPS, 8], 0.5, tl.float32)
    else:
        u = uniforms(tl.load(keys + part), step, groups, GROUPS)
    level = level_of(x, norm, u, BITS)
    codes += tl.load(parts + CODES * number + part)
    store_codes(codes, level, groups, at, numel, BITS)
    if KEEP:
        left = x - value_of(level, norm, BITS)
        if ADD:
            left = tl.where(idle, whole, left)
            left = tl.where(is_finite(left), left, 0.0)
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
    norms,
    norms_apart,
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
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a tile of the mean, and add the flags to the first element of its parameter."""
    tile = tl.program_id(0)
    part = tl.load(tiles + tile)
    local = tl.load(tiles + count + tile)
    begin = cell(parts, number, part, BEGIN)
    start = cell(parts, number, part, START)
    there = cell(parts, number, part, THERE)
    numel = cell(parts, number, part, NUMEL)
    GROUPS: tl.constexpr = TILE // 8
    groups = local // 8 + tl.arange(0, GROUPS)
    at = groups[:, None] * 8 + tl.arange(0, 8)[None, :]  # (GROUPS, 8)
    codes += tl.load(parts + CODES * number + part)
    norms += tl.load(parts + NORMS * number + part)
    total = mean_of(
        codes, codes_apart, norms, norms_apart, workers, share, groups, at, numel, block_size, BITS
    )
    here = start + at
    total = tl.where(here == begin, total + arrived(flags, flags_apart, senders), total)
    tl.store(out + here, total, mask=at < there)


class Table:
    """The parts of a bucket that share a payload of codes and norms, on a device.

    Args:
        parts: name, place among the bucket's parameters, first element and end of each part.
        bits: of a code.
        block_size: elements that share a norm.
        nearest: whether elements are rounded to the nearest level, or at random.
        device: of the bucket.

    Attributes:
        fields: dtype and length of codes and norms.
        parts: of each part the parameter's place, its first element, the part's first element in
            the buffer, how many elements lie there, how many are encoded, and where its codes and
            norms begin in the payload, ``(7, n)`` int64.
        tiles: part and first element in the part of each tile, ``(2, m)`` int32.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int, int, int]],
        bits: int,
        block_size: int,
        nearest: bool,
        device: torch.device,
    ) -> None:
        self.names = [name for name, *_ in parts]
        self.bits, self.block_size, self.nearest = bits, block_size, nearest
        rows, tiles, codes, norms = [], list[tuple[int, int]](), 0, 0
        for index, (_, place, start, stop) in enumerate(parts):
            numel = stop - start
            rows.append((place, start, start, numel, numel, codes, norms))
            tiles += [(index, local) for local in range(0, numel, TILE)]
            codes, norms = codes + packed_bytes(numel, bits), norms - -numel // block_size
        self.fields = [(torch.uint8, codes), (torch.float32, norms)]
        self.parts = torch.tensor(rows, dtype=torch.int64, device=device).t().contiguous()
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device).t().contiguous()
        self._keys: dict[tuple[int, int, int], Tensor] = {}
        # A tile consists of complete blocks, or their norms are found before.
        self._block = block_size if block_size <= TILE and TILE % block_size == 0 else 0

    def keys(self, bucket: Bucket) -> Tensor:
        """Return the Philox key of each part, ``(n,)`` int64."""
        if self.nearest:
            return self.parts
        worker = bucket.seed, bucket.worker, bucket.phase
        if worker not in self._keys:
            keys = [bucket.key(name) for name in self.names]
            self._keys[worker] = torch.tensor(keys, dtype=torch.int64, device=self.parts.device)
        return self._keys[worker]

    @property
    def _grid(self) -> tuple[int]:
        return (self.tiles.shape[1],)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Packed:
        """Return the payload (codes, norms), as ``core.segments.Pending`` says if there is one.

        The numbers are those of Philox-4×32-10: element i of a part gets word ``i mod 4`` of
        counter ``(i // 4, step, 0, 0)``, under a key of worker and part.
        """
        pending = bucket.pending
        adds = pending is not None and pending.grad is not None
        packed = reserve([*self.fields, *(pending.flag_field if pending else [])], buffer.device)
        codes, norms = packed[:2]
        given = (buffer, buffer, 1.0, 1.0, buffer)
        if pending is not None:
            grad = buffer if pending.grad is None else pending.grad
            given = (buffer, grad, pending.decay, pending.gain, pending.peaks)
        table = self.tiles, self.tiles.shape[1], self.parts, self.parts.shape[1]
        most = self.tiles
        if not self._block:
            most = _zeros(norms.numel(), buffer, pending)
            launch(
                raise_peaks,
                self._grid,
                *(*given, *table, self.block_size, most),
                ADD=adds,
                LARGE=self.block_size >= TILE,
                TILE=TILE,
            )
        launch(
            round_tiles,
            self._grid,
            *(*given, *table, self.keys(bucket), bucket.step, self.block_size, most),
            *(codes, norms, *_ending(packed, pending)),
            ADD=adds,
            KEEP=adds or pending is None,
            NEAREST=self.nearest,
            BITS=self.bits,
            BLOCK=self._block,
            TILE=TILE,
        )
        return packed.head() if pending is not None and pending.flagged else packed

    def average(
        self, payloads: Sequence[Sequence[Tensor]], out: Tensor, pending: Pending | None
    ) -> None:
        """Write the mean of all workers' payloads to ``out``."""
        codes, codes_apart = evenly([payload[0] for payload in payloads])
        norms, norms_apart = evenly([payload[1] for payload in payloads])
        arrived = [] if pending is None else pending.flags
        flags, flags_apart = evenly(arrived or [norms])
        launch(
            average_tiles,
            self._grid,
            *(codes, codes_apart, norms, norms_apart, len(payloads), 1 / len(payloads), out),
            *(flags, flags_apart, len(arrived)),
            *(self.tiles, self.tiles.shape[1], self.parts, self.parts.shape[1], self.block_size),
            BITS=self.bits,
            TILE=TILE,
        )


def _zeros(count: int, like: Tensor, pending: Pending | None) -> Tensor:
    if pending is not None:
        return pending.work.take(count)
    return torch.zeros(count, dtype=torch.int32, device=like.device)


def _ending(packed: Packed, pending: Pending | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return what ``end_message`` needs; without a flag it writes to memory that nobody reads."""
    if pending is not None:
        return pending.ending(packed)
    flag = packed[1].new_empty(2)
    return flag[:1], flag[1:], packed.padding, packed.layout.padding


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
        codes, norms = table.encode(left, bucket)
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


ATTEMPTS = {"quantise": _quantise, "dequantise": _dequantise, "levels": _buckets}
"""Name -> function that yields results of kernels for ``(1000,)`` numbers, beside torch's."""
