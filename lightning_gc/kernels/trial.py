"""Trial: run every Triton kernel once, on a small tensor, and compare with the torch reference.

A kernel that does not compile or run would else show in a training step, on one worker perhaps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gc.coding import payload_validation
from lightning_gc.kernels import accumulate, dequantise, quantise, select

_BLOCK = 64
_BITS = (5, 8, 12)  # codes with a rest only, with whole bytes only, with both
_SCALE = 0.5  # a product that is exact, however it is rounded


def run(device: torch.device) -> None:
    """Run all kernels on ``device``; the host waits.

    Raises:
        RuntimeError: one does not compile or run, or its result is not that of torch.
    """
    numbers = torch.linspace(-1, 1, 1000, device=device)
    for name, attempt in _ATTEMPTS.items():
        try:
            for ours, theirs in attempt(numbers):
                if not torch.equal(ours, theirs):
                    raise ArithmeticError("its result is not that of torch")
        except Exception as error:  # any exception of a compiler or driver
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error


def _accumulate(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels import accumulate as kernel

    ours, theirs = numbers.clone(), numbers.clone()
    places = torch.arange(0, numbers.numel(), 3, device=numbers.device)
    values = numbers[::3].contiguous()
    kernel.accumulate(ours, places, values, _SCALE)
    accumulate.reference(theirs, places, values, _SCALE)
    yield ours, theirs


def _select(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels import select as kernel

    ours, theirs = numbers.clone(), numbers.clone()
    found, wanted = kernel.select(ours, 0.25), select.reference(theirs, 0.25)
    yield from zip((*found, ours), (*wanted, theirs), strict=True)
    yield kernel.reaching(numbers, 0.25), select.reaching_reference(numbers, 0.25)


def _quantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels import quantise as kernel

    norms = quantise.in_blocks(numbers, _BLOCK).abs().amax(1)
    quarter = numbers.new_full((len(norms) * _BLOCK,), 0.25)
    for bits, noise in zip(_BITS, (quarter, None, quarter), strict=True):
        ours, theirs = numbers.clone(), numbers.clone()
        packed = kernel.quantise(ours, norms, _BLOCK, bits, noise)
        yield packed, quantise.reference(theirs, norms, _BLOCK, bits, noise)
        yield ours, theirs
    # Of random numbers of its own, only what they sum to is known.
    left, sent = numbers.clone(), torch.zeros_like(numbers)
    random = torch.Generator(numbers.device).manual_seed(0)
    packed = kernel.quantise(left, norms, _BLOCK, _BITS[0], random)
    check = payload_validation.codes
    dequantise.reference(packed, norms, _BLOCK, _BITS[0], sent, 1.0, check)
    near = (left + sent - numbers).abs() < 1e-6
    yield near, torch.ones_like(near)


def _dequantise(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    from lightning_gc.kernels.triton_kernels import dequantise as kernel

    norms = quantise.in_blocks(numbers, _BLOCK).abs().amax(1)
    for bits in _BITS:
        packed = quantise.reference(numbers.clone(), norms, _BLOCK, bits, None)
        ours, theirs = numbers.clone(), numbers.clone()
        kernel.dequantise(packed, norms, _BLOCK, bits, ours, _SCALE)
        check = payload_validation.codes
        dequantise.reference(packed, norms, _BLOCK, bits, theirs, _SCALE, check)
        yield ours, theirs


_ATTEMPTS = {
    "accumulate": _accumulate,
    "select": _select,
    "quantise": _quantise,
    "dequantise": _dequantise,
}
