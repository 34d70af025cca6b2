"""Triton kernels of ``select``: add, mark and count; then compact by a running sum over blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.kernels.triton_kernels import EXACT

BLOCK = 2048  # elements; 16 to a thread


@triton.jit
def mark(
    gradient, error, threshold, bitmap, counts, numel, ADD: tl.constexpr, GROUPS: tl.constexpr
):
    """Write one bit per element to ``bitmap`` and the set bits per block to ``counts``."""
    block = tl.program_id(0)
    groups = block * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)[None, :]
    at = groups[:, None] * 8 + lane  # (GROUPS, 8)
    inside = at < numel
    x = tl.load(error + at, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(error + at, x, mask=inside)
    below = tl.abs(x) < tl.load(threshold)  # false for NaN
    hits = tl.where(inside & (below == 0), 1, 0)
    marks = tl.sum(hits << lane, axis=1)
    tl.store(bitmap + groups, marks.to(tl.uint8), mask=groups * 8 < numel)
    tl.store(counts + block, tl.sum(tl.sum(hits, axis=1), axis=0))


@triton.jit
def compact(
    error, bitmap, ends, values, positions, capacity, numel, MOVE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write positions, and with MOVE elements, in order; ``ends``: selected up to a block's end."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    marks = tl.load(bitmap + at // 8, mask=at < numel, other=0).to(tl.int32)
    hits = (marks >> (at % 8)) & 1
    start = tl.load(ends + block) - tl.sum(hits, axis=0)
    rank = start + tl.cumsum(hits, axis=0) - 1
    taken = (hits == 1) & (rank < capacity)
    tl.store(positions + rank, at.to(tl.int64), mask=taken)
    if MOVE:
        x = tl.load(error + at, mask=taken, other=0.0)
        tl.store(values + rank, x, mask=taken)
        tl.store(error + at, tl.zeros([BLOCK], tl.float32), mask=taken)


def select(
    gradient: Tensor | None, error: Tensor, threshold: float | Tensor, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, positions, reached); see ``kernels.select``."""
    with torch.cuda.device_of(error):
        bitmap, ends = _mark_and_count(gradient, error, threshold)
        reached = ends[-1].long()
        room = int(reached) if capacity is None else capacity
        values = torch.zeros(room, dtype=torch.float32, device=error.device)
        return values, _compact(error, bitmap, ends, values, room), reached


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the positions; see ``kernels.select``."""
    with torch.cuda.device_of(buffer):
        bitmap, ends = _mark_and_count(None, buffer, threshold)
        return _compact(buffer, bitmap, ends, None, int(ends[-1]))


def _mark_and_count(
    gradient: Tensor | None, error: Tensor, threshold: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Add and mark; return one bit per element, and how many are set up to each block's end."""
    numel, device = error.numel(), error.device
    if isinstance(threshold, Tensor):
        limit = threshold.to(device, torch.float32)
    else:
        limit = torch.full((), threshold, dtype=torch.float32, device=device)
    blocks = triton.cdiv(numel, BLOCK)
    bitmap = torch.empty(triton.cdiv(numel, 8), dtype=torch.uint8, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    mark[(blocks,)](
        error if gradient is None else gradient,
        *(error, limit, bitmap, counts, numel),
        ADD=gradient is not None,
        GROUPS=BLOCK // 8,
        **EXACT,
    )
    return bitmap, counts.cumsum(0, dtype=torch.int32)


def _compact(
    error: Tensor, bitmap: Tensor, ends: Tensor, values: Tensor | None, room: int
) -> Tensor:
    positions = torch.full((room,), error.numel(), dtype=torch.int64, device=error.device)
    if room:
        compact[(len(ends),)](
            *(error, bitmap, ends, error if values is None else values, positions),
            *(room, error.numel()),
            MOVE=values is not None,
            BLOCK=BLOCK,
            **EXACT,
        )
    return positions
