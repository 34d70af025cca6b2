"""dequantise: unpack codes and add their values to a tensor (QSGD's decoder)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes, unpack
from lightning_gc.kernels.dispatch import fused
from lightning_gc.kernels.quantise import in_blocks, in_one_pass, pieces

Check = Callable[[Tensor, int, Tensor], Tensor]


def dequantise(
    packed: Tensor,
    norms: Tensor,
    block_size: int,
    bits: int,
    out: Tensor,
    scale: float,
    check: Check,
) -> None:
    """Add ``scale · norm · (code − s) / s`` to ``out``, with ``s = 2^(bits−1) − 1``.

    Args:
        packed: ``(packed_bytes(numel, bits),)`` uint8.
        norms: ``(ceil(numel / block_size),)`` float32.
        block_size: elements that share a norm.
        bits: bits per code, 2..16.
        out: ``(numel,)``, changed in place.
        scale: 1/W for a mean over W workers.
        check: called with the codes, 2s and the norms; raises or returns the norms to use where a
            code is above 2s, which no encoder makes (``payload_validation.codes``). The Triton
            kernel does not call it: such an element becomes NaN.

    On CUDA one kernel reads ``4 + bits/8`` bytes and writes 4 per element. Triton 3.2's interpreter
    rounds the product before the sum; torch and the kernel do not.

    Raises:
        ValueError: ``packed`` has a wrong length; whatever ``check`` raises.

    Example:
        >>> from lightning_gc.core import payload_validation
        >>> out, codes = torch.zeros(2), torch.tensor([6], dtype=torch.uint8)
        >>> dequantise(codes, torch.tensor([3.0]), 2, 2, out, 1.0, payload_validation.codes)
        >>> out
        tensor([3., 0.])
    """
    contiguous = packed.is_contiguous() and norms.is_contiguous()
    if fused(out) and contiguous and norms.dtype == torch.float32:
        from lightning_gc.kernels.triton_kernels.dequantise import dequantise as program

        program(packed, norms, block_size, bits, out, scale)
        return
    expected = packed_bytes(out.numel(), bits)
    if packed.shape != (expected,):
        raise ValueError(f"The codes take {expected} bytes, but {tuple(packed.shape)} have come.")
    if in_one_pass(out, norms, block_size, bits) and packed.is_contiguous():
        from lightning_gc.kernels.numba_kernels.dequantise import dequantise as host_program

        if host_program(packed, norms, block_size, bits, out, scale) <= 2**bits - 2:
            return  # else nothing has been added
    for piece, blocks in pieces(out, block_size, bits):
        whole = piece.start is None
        coded = packed if whole else packed[piece.start * bits // 8 : piece.stop * bits // 8]
        reference(coded, norms[blocks], block_size, bits, out[piece], scale, check)


def reference(
    data: Tensor, norms: Tensor, block_size: int, bits: int, out: Tensor, scale: float, check: Check
) -> None:
    """Compute the same with torch operations."""
    numel, s = out.numel(), 2 ** (bits - 1) - 1
    codes = unpack(data, bits, numel, torch.uint8 if bits <= 8 else torch.int32)
    norms = check(codes, 2 * s, norms)
    steps = torch.full((), s, dtype=norms.dtype, device=norms.device)
    levels = in_blocks(codes.to(norms.dtype) - s, block_size)
    rounded = (levels / steps * norms.view(-1, 1)).view(-1)[:numel]
    out.add_(rounded, alpha=scale)
