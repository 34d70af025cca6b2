"""Triton kernel of ``quantise``: a tile's row is eight elements, packed into ``bits`` bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.kernels.triton_kernels import EXACT, kernel

GROUPS = 128


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
    with torch.cuda.device_of(buffer):
        round_and_pack[(triton.cdiv(numel, 8 * GROUPS),)](
            *(buffer, norms, numbers, packed, seed, numel, block_size),
            DRAW=draw,
            NEAREST=noise is None,
            STEPS=float(2 ** (bits - 1) - 1),
            BITS=bits,
            GROUPS=GROUPS,
            **EXACT,
        )
    return packed
