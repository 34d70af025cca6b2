"""Triton kernels of the functions in this folder that work on one tensor; imported lazily."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.kernels.gpu.launch import kernel, launch

PAYLOAD_BLOCK = 512
"""Elements of a payload that one program of ``accumulate`` adds."""
SELECT_BLOCK = 2048
"""Elements that one program of ``select`` reads; 16 to a thread."""


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
    """Return the positions; see ``topk_selection``."""
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


def _accumulate(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    out, values = numbers.clone(), numbers[::3].contiguous()
    places = torch.arange(0, numbers.numel(), 3, device=numbers.device)
    accumulate(out, places, values, 0.5)
    yield out, numbers.index_add(0, places, values, alpha=0.5)


def _select(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield reaching(numbers, 0.25), (numbers.abs() >= 0.25).nonzero().view(-1)


ATTEMPTS = {
    "accumulate": _accumulate,
    "select": _select,
}
