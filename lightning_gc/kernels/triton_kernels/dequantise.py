"""Triton kernel of ``dequantise``: a tile's row is eight codes, unpacked from ``bits`` bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.kernels.triton_kernels import EXACT, kernel

GROUPS = 128


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
    """Add ``8 · GROUPS`` elements; STEPS is s, a whole number."""
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
    with torch.cuda.device_of(out):
        unpack_and_add[(triton.cdiv(numel, 8 * GROUPS),)](
            *(packed, norms, out, float(scale), numel, block_size),
            STEPS=2 ** (bits - 1) - 1,
            BITS=bits,
            GROUPS=GROUPS,
            **EXACT,
        )
