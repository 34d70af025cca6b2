"""Triton kernel of ``accumulate``: gather, add, scatter, one thread per payload element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.kernels.triton_kernels import EXACT, kernel

BLOCK = 512


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
    with torch.cuda.device_of(out):
        scatter_add[(triton.cdiv(chosen, BLOCK),)](
            *(out, positions, values, float(scale), chosen, out.numel()), BLOCK=BLOCK, **EXACT
        )
