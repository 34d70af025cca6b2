"""Trial: run every kernel for the host once, on a small tensor, and compare it with torch's sums.

A compiler or processor that is unknown may not run one, or contract arithmetic; workers without
numba would then decode other bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack
from lightning_gc.kernels.numba_kernels import bfloat16, dequantise, quantise

_NUMEL, _BLOCK, _SEED = 5000, 48, 1


def run() -> None:
    """Run all kernels; this compiles them, unless their code is on disk.

    Raises:
        ArithmeticError: the result of one is not torch's.
    """
    numbers = torch.linspace(-1, 1, _NUMEL, dtype=torch.float32, device="cpu").pow(3)
    numbers[96:240] = 0
    for name, attempt in {"bfloat16": _bfloat16, "quantise": _quantise}.items():
        for ours, theirs in attempt(numbers):
            if not torch.equal(ours, theirs):
                raise ArithmeticError(f"the result of {name} is not that of torch")


def _bfloat16(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    left, rounded = numbers.clone(), numbers.to(torch.bfloat16)
    values = bfloat16.round_off(left)
    yield values, rounded
    yield left, numbers - rounded
    out = numbers.clone()
    bfloat16.add(out, values, 1 / 3)
    yield out, numbers.add(rounded, alpha=1 / 3)


def _quantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    norms = quantise.largest(numbers, _BLOCK)
    padded = torch.nn.functional.pad(numbers, (0, -_NUMEL % _BLOCK))
    yield norms, padded.view(-1, _BLOCK).abs().amax(1)
    wide = norms.repeat_interleave(_BLOCK)[:_NUMEL]
    drawn = np.random.SFC64(_SEED).random_raw(_NUMEL // 2).view(np.int32) & 0xFFFFFF
    random = torch.from_numpy(drawn).float() * 2.0**-24
    generator = torch.Generator().manual_seed(_SEED)
    for bits, noise, u in ((4, generator, random), (8, None, 0.5), (3, None, 0.5)):
        s = torch.tensor(2.0 ** (bits - 1) - 1, dtype=torch.float32, device="cpu")
        ratio = numbers / wide.where(wide > 0, 1.0)
        levels = (ratio.abs() * s + u).floor().clamp(max=s).copysign(ratio)
        codes = (levels + s).to(torch.uint8)
        left = numbers.clone()
        packed = quantise.quantise(left, norms, _BLOCK, bits, noise)
        yield packed, pack(codes, bits)
        yield left, numbers - levels / s * wide
        out = numbers.clone()
        dequantise.dequantise(packed, norms, _BLOCK, bits, out, 1 / 3)
        yield out, numbers.add((codes - s) / s * wide, alpha=1 / 3)
