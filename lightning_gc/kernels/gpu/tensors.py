"""Triton kernels of the functions in this folder that work on one tensor; imported lazily."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes, unpack
from lightning_gc.kernels.gpu.launch import kernel, launch

PAYLOAD_BLOCK = 512
"""Elements of a payload that one program of ``accumulate`` adds."""
SELECT_BLOCK = 2048
"""Elements that one program of ``select`` reads; 16 to a thread."""
GROUPS = 128
"""Groups of eight codes that one program of ``quantise`` or ``dequantise`` converts."""


@kernel()
def scatter_add(out, positions, values, scale, chosen, numel, BLOCK: tl.constexpr):
    """Add BLOCK elements of the payload. Positions outside ``out`` are skipped: not trusted."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < chosen
    place = tl.load(positions + at, mask=inside, other=0)
    inside = inside & (place >= 0) & (place < numel)
    added = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) * scale
    kept = tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, kept + added, mask=inside)


def accumulate(out: Tensor, positions: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale · values`` to ``out``; see ``kernels.accumulate``."""
    chosen = positions.numel()
    if not chosen:
        return
    launch(
        scatter_add,
        (triton.cdiv(chosen, PAYLOAD_BLOCK),),
        *(out, positions, values, float(scale), chosen, out.numel()),
        BLOCK=PAYLOAD_BLOCK,
    )


@kernel("buffer", "numel")
def mark(buffer, threshold, bitmap, counts, numel, GROUPS: tl.constexpr):
    """Write one bit per element to ``bitmap`` and the set bits per block to ``counts``."""
    block = tl.program_id(0)
    groups = block * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)[None, :]
    at = groups[:, None] * 8 + lane  # (GROUPS, 8)
    inside = at < numel
    x = tl.load(buffer + at, mask=inside, other=0.0)
    below = tl.abs(x) < tl.load(threshold)  # false for NaN
    hits = tl.where(inside & (below == 0), 1, 0)
    marks = tl.sum(hits << lane, axis=1)
    tl.store(bitmap + groups, marks.to(tl.uint8), mask=groups * 8 < numel)
    tl.store(counts + block, tl.sum(tl.sum(hits, axis=1), axis=0))


@kernel()
def compact(bitmap, ends, positions, numel, BLOCK: tl.constexpr):
    """Write positions in order; ``ends``: selected up to a block's end."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    marks = tl.load(bitmap + at // 8, mask=at < numel, other=0).to(tl.int32)
    hits = (marks >> (at % 8)) & 1
    start = tl.load(ends + block) - tl.sum(hits, axis=0)
    rank = start + tl.cumsum(hits, axis=0) - 1
    tl.store(positions + rank, at.to(tl.int64), mask=hits == 1)


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the positions; see ``kernels.select``."""
    numel, device = buffer.numel(), buffer.device
    if isinstance(threshold, Tensor):
        limit = threshold.to(device, torch.float32)
    else:
        limit = torch.full((), threshold, dtype=torch.float32, device=device)
    blocks = triton.cdiv(numel, SELECT_BLOCK)
    bitmap = torch.empty(triton.cdiv(numel, 8), dtype=torch.uint8, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    launch(mark, (blocks,), buffer, limit, bitmap, counts, numel, GROUPS=SELECT_BLOCK // 8)
    ends = counts.cumsum(0, dtype=torch.int32)
    positions = torch.empty(int(ends[-1]), dtype=torch.int64, device=device)
    if positions.numel():
        launch(compact, (blocks,), bitmap, ends, positions, numel, BLOCK=SELECT_BLOCK)
    return positions


@triton.jit
def uniforms(seed, groups, GROUPS: tl.constexpr):
    """Return ``(GROUPS, 8)`` numbers in [0, 1): four words each of two Philox counters."""
    counters = groups[:, None] * 2 + tl.arange(0, 2)[None, :]
    a, b, c, d = tl.rand4x(seed, counters)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (GROUPS, 8))  # a b c d, twice


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
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Round and pack ``8 · GROUPS`` elements; STEPS is s, a float."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)[None, :]
    at = groups[:, None] * 8 + lane  # (GROUPS, 8)
    inside = at < numel
    x = tl.load(buffer + at, mask=inside, other=0.0)
    norm = tl.load(norms + at // block_size, mask=inside, other=0.0)
    # Older versions of Triton flush subnormal numbers to zero in divisions: scale them up.
    larger = tl.where(norm < 2.0**-64, 2.0**96, 1.0)
    ratio = tl.div_rn(x * larger, tl.where(norm > 0, norm, 1.0) * larger)
    if NEAREST:
        u = tl.full([GROUPS, 8], 0.5, tl.float32)
    elif DRAW:
        u = uniforms(seed, groups, GROUPS)
    else:
        u = tl.load(noise + at, mask=inside, other=0.0)
    steps = tl.full([GROUPS, 8], STEPS, tl.float32)
    level = tl.floor(tl.abs(ratio) * steps + u)
    level = tl.where(level > steps, steps, level)  # NaN stays
    sign = ratio.to(tl.int32, bitcast=True) & -2147483648  # of -0.0 too
    level = (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(buffer + at, x - tl.div_rn(level, steps) * norm, mask=inside)

    code = tl.where(inside & (level == level), level + steps, 0.0).to(tl.int32)
    WHOLE: tl.constexpr = BITS // 8
    REST: tl.constexpr = BITS % 8
    for i in tl.static_range(WHOLE):
        tl.store(packed + i * numel + at, ((code >> (8 * i)) & 255).to(tl.uint8), mask=inside)
    if REST > 0:
        plane = packed + WHOLE * numel
        word = tl.sum((code >> (8 * WHOLE)).to(tl.int64) << (REST * lane), axis=1)
        # Not numel * REST: of hundreds of millions of elements that is more than int32 holds.
        length = numel // 8 * REST + (numel % 8 * REST + 7) // 8
        for i in tl.static_range(REST):
            byte = groups * REST + i
            tl.store(plane + byte, ((word >> (8 * i)) & 255).to(tl.uint8), mask=byte < length)


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
        STEPS=float(2 ** (bits - 1) - 1),
        BITS=bits,
        GROUPS=GROUPS,
    )
    return packed


@kernel("out", "numel")
def unpack_and_add(
    packed,
    norms,
    out,
    scale,
    numel,
    block_size,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Add ``8 · GROUPS`` elements; STEPS is s, an integer."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)[None, :]
    at = groups[:, None] * 8 + lane  # (GROUPS, 8)
    inside = at < numel
    WHOLE: tl.constexpr = BITS // 8
    REST: tl.constexpr = BITS % 8
    code = tl.zeros([GROUPS, 8], tl.int32)
    for i in tl.static_range(WHOLE):
        byte = tl.load(packed + i * numel + at, mask=inside, other=0)
        code |= byte.to(tl.int32) << (8 * i)
    if REST > 0:
        plane = packed + WHOLE * numel
        # Not numel * REST: of hundreds of millions of elements that is more than int32 holds.
        length = numel // 8 * REST + (numel % 8 * REST + 7) // 8
        word = tl.zeros([GROUPS], tl.int64)
        for i in tl.static_range(REST):
            index = groups * REST + i
            byte = tl.load(plane + index, mask=index < length, other=0)
            word |= byte.to(tl.int64) << (8 * i)
        rest = (word[:, None] >> (REST * lane)) & ((1 << REST) - 1)
        code |= rest.to(tl.int32) << (8 * WHOLE)

    norm = tl.load(norms + at // block_size, mask=inside, other=0.0)
    steps = tl.full([GROUPS, 8], STEPS, tl.float32)
    rounded = tl.div_rn((code - STEPS).to(tl.float32), steps) * norm
    rounded = tl.where(code > 2 * STEPS, float("nan"), rounded)
    kept = tl.load(out + at, mask=inside, other=0.0)
    # One rounding for product and sum, as in torch's add with alpha.
    weight = tl.zeros([GROUPS, 8], tl.float32) + scale
    tl.store(out + at, tl.fma(rounded, weight, kept), mask=inside)


def dequantise(
    packed: Tensor, norms: Tensor, block_size: int, bits: int, out: Tensor, scale: float
) -> None:
    """Add the values of the codes; see ``kernels.dequantise``."""
    numel = out.numel()
    launch(
        unpack_and_add,
        (triton.cdiv(numel, 8 * GROUPS),),
        *(packed, norms, out, float(scale), numel, block_size),
        STEPS=2 ** (bits - 1) - 1,
        BITS=bits,
        GROUPS=GROUPS,
    )


_NORM_BLOCK = 64
_BITS = (5, 8, 12)  # codes with a rest only, with whole bytes only, with both


def _accumulate(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    out, values = numbers.clone(), numbers[::3].contiguous()
    places = torch.arange(0, numbers.numel(), 3, device=numbers.device)
    accumulate(out, places, values, 0.5)
    yield out, numbers.index_add(0, places, values, alpha=0.5)


def _select(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield reaching(numbers, 0.25), (numbers.abs() >= 0.25).nonzero().view(-1)


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


ATTEMPTS = {
    "accumulate": _accumulate,
    "select": _select,
    "quantise": _quantise,
    "dequantise": _dequantise,
}
"""Name -> function that yields results of kernels for ``(1000,)`` numbers, beside torch's."""
