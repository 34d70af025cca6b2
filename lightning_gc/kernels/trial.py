"""Trial: run every Triton kernel once, on a small tensor, and compare with what torch computes.

A kernel that does not compile or run would else show in a training step, on one worker perhaps.
Equality bit for bit is left to the tests; this is for a compiler or device that is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gc.core.bit_packing import unpack

_BLOCK = 64
_BITS = (5, 8, 12)  # codes with a rest only, with whole bytes only, with both


def run(device: torch.device) -> None:
    """Run all kernels on ``device``; the host waits.

    Raises:
        RuntimeError: one does not compile or run, or its result is not that of torch.
    """
    numbers = torch.linspace(-1, 1, 1000, dtype=torch.float32, device=device)
    for name, attempt in _ATTEMPTS.items():
        try:
            for ours, theirs in attempt(numbers):
                if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-6):
                    raise ArithmeticError("its result is not that of torch")
        except Exception as error:  # any exception of a compiler or driver
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error


def _accumulate(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels.accumulate import accumulate

    out, values = numbers.clone(), numbers[::3].contiguous()
    places = torch.arange(0, numbers.numel(), 3, device=numbers.device)
    accumulate(out, places, values, 0.5)
    yield out, numbers.index_add(0, places, values, alpha=0.5)


def _select(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels.select import reaching, select

    left = numbers.clone()
    values, positions = select(left, 0.25)
    reach = numbers.abs() >= 0.25
    yield positions, reach.nonzero().view(-1)
    yield values, numbers.masked_select(reach)
    yield left, numbers.masked_fill(reach, 0)
    yield reaching(numbers, 0.25), positions


def _quantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels.quantise import quantise

    norms, wide = _norms(numbers)
    random = torch.Generator(numbers.device).manual_seed(0)
    quarter = numbers.new_full((len(norms) * _BLOCK,), 0.25)
    for bits, noise, shift in zip(_BITS, (random, None, quarter), (None, 0.5, 0.25), strict=True):
        left, s = numbers.clone(), 2 ** (bits - 1) - 1
        packed = quantise(left, norms, _BLOCK, bits, noise)
        levels, exact = unpack(packed, bits, 1000, torch.int32) - s, numbers / wide * s
        yield left, numbers - levels / s * wide
        if shift is None:  # of random numbers of its own only the bounds are known
            yield (levels - exact).abs() < 1.001, torch.ones_like(levels, dtype=torch.bool)
            continue
        rounded = exact.abs() + shift
        sure = (rounded.frac() - 0.5).abs() < 0.499  # not where the next bit decides
        yield levels * sure, rounded.floor().clamp(max=s).copysign(exact).int() * sure


def _dequantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels.dequantise import dequantise

    norms, wide = _norms(numbers)
    for bits in _BITS:
        s = 2 ** (bits - 1) - 1
        packed = torch.arange(1000 * bits // 8, device=numbers.device).mul(37).to(torch.uint8)
        codes = unpack(packed, bits, 1000, torch.int32)
        wanted = numbers + 0.5 * wide * (codes - s) / s
        out = numbers.clone()
        dequantise(packed, norms, _BLOCK, bits, out, 0.5)
        known = codes <= 2 * s
        yield out.masked_fill(~known, 0), wanted.masked_fill(~known, 0)
        yield out.isnan(), ~known


def _norms(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return norms of blocks, and of every element that of its block."""
    blocks = torch.nn.functional.pad(numbers, (0, -numbers.numel() % _BLOCK)).view(-1, _BLOCK)
    norms = blocks.abs().amax(1)
    return norms, norms.repeat_interleave(_BLOCK)[: numbers.numel()]


_ATTEMPTS = {
    "accumulate": _accumulate,
    "select": _select,
    "quantise": _quantise,
    "dequantise": _dequantise,
}
