"""Triton kernels of ``select``: mark and count; then compact by a running sum over blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.kernels.triton_kernels import EXACT, kernel

BLOCK = 2048  # elements; 16 to a thread


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
def compact(
    buffer, bitmap, ends, values, positions, numel, MOVE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write positions, and with MOVE elements, in order; ``ends``: selected up to a block's end."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    marks = tl.load(bitmap + at // 8, mask=at < numel, other=0).to(tl.int32)
    hits = (marks >> (at % 8)) & 1
    start = tl.load(ends + block) - tl.sum(hits, axis=0)
    rank = start + tl.cumsum(hits, axis=0) - 1
    taken = hits == 1
    tl.store(positions + rank, at.to(tl.int64), mask=taken)
    if MOVE:
        x = tl.load(buffer + at, mask=taken, other=0.0)
        tl.store(values + rank, x, mask=taken)
        tl.store(buffer + at, tl.zeros([BLOCK], tl.float32), mask=taken)


def select(buffer: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return values and positions; see ``kernels.select``."""
    return _run(buffer, threshold, move=True)


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the positions; see ``kernels.select``."""
    return _run(buffer, threshold, move=False)[1]


def _run(buffer: Tensor, threshold: float | Tensor, move: bool) -> tuple[Tensor, Tensor]:
    """Return values, which are ``buffer`` unless they are moved out of it, and positions."""
    numel, device = buffer.numel(), buffer.device
    if isinstance(threshold, Tensor):
        limit = threshold.to(device, torch.float32)
    else:
        limit = torch.full((), threshold, dtype=torch.float32, device=device)
    blocks = triton.cdiv(numel, BLOCK)
    bitmap = torch.empty(triton.cdiv(numel, 8), dtype=torch.uint8, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    with torch.cuda.device_of(buffer):
        mark[(blocks,)](buffer, limit, bitmap, counts, numel, GROUPS=BLOCK // 8, **EXACT)
        ends = counts.cumsum(0, dtype=torch.int32)
        reached = int(ends[-1])
        positions = torch.empty(reached, dtype=torch.int64, device=device)
        values = torch.empty(reached, device=device, dtype=buffer.dtype) if move else buffer
        if reached:
            compact[(blocks,)](
                buffer, bitmap, ends, values, positions, numel, MOVE=move, BLOCK=BLOCK, **EXACT
            )
    return values, positions
