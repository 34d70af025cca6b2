"""Quantise and dequantise: QSGD's encoder and decoder with packed bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.kernels.dispatch import compiled, table_for
from lightning_gc.kernels.shards import LevelTable

_PIECE = 1 << 16  # elements, about
Check = Callable[[Tensor, int, Tensor], Tensor]
Noise = Tensor | torch.Generator | np.random.SFC64 | None


@functools.lru_cache(maxsize=1024)
def _of_one(kind: type[LevelTable], numel: int, *settings: Any) -> LevelTable:
    return kind([("", 0, 0, numel)], *settings)


def _table(
    flat: Tensor, norms: Tensor, block_size: int, bits: int, *, nearest: bool = True
) -> LevelTable | None:
    """Return the table of one part; None if kernels, which check no index, cannot take it."""
    fit = norms.shape == (-(-flat.numel() // block_size),) and norms.is_contiguous()
    if not fit or norms.dtype != torch.float32:
        return None
    settings = bits, block_size, nearest
    kind = table_for(flat, "levels", settings)
    return None if kind is None else _of_one(kind, flat.numel(), *settings, flat.device)


def quantise(
    buffer: Tensor,
    norms: Tensor,
    block_size: int,
    bits: int,
    noise: Tensor | torch.Generator | None,
) -> Tensor:
    """Subtract the rounded values from ``buffer`` and return their packed codes.

    ``level_i = sign(x_i) · min(s, floor(s·|x_i| / norm + u_i))``, ``code_i = level_i + s`` and
    ``x_i −= norm · level_i / s``, with ``s = 2^(bits−1) − 1`` and u_i uniform in [0, 1), so that
    the expectation of the subtracted values is x. NaN has code 0 and stays NaN in ``buffer``.

    Args:
        buffer: x, ``(numel,)`` float32, changed in place.
        norms: ``(ceil(numel / block_size),)``, at least the largest magnitude of each block; 0 for
            a block of zeros.
        block_size: elements that share a norm.
        bits: bits per code, 2..16.
        noise: u, one number for each element of all blocks, ``(len(norms) · block_size,)``; or a
            generator whose ``initial_seed()`` determines them. On the host element i gets 24 bits
            of an SFC64 stream, in half the time of torch's generator. The Triton kernel uses
            word ``i mod 4`` of Philox-4×32-10 with that seed as key and counter ``(i // 4, 0, 0,
            0)``, made a float as by ``tl.rand``: other numbers, equal in distribution. None: u is
            1/2, so that x is rounded to the nearest level, and halves away from zero.

    Returns:
        ``(packed_bytes(numel, bits),)`` uint8, as by ``bit_packing.pack``.

    On CUDA, and on the host where numba is and codes have at most 8 bits, one kernel reads 4 bytes
    and writes ``4 + bits/8`` per element. Torch rounds with given numbers.

    Example:
        >>> x = torch.tensor([1.0, -0.25])
        >>> quantise(x, torch.tensor([1.0]), 2, 2, torch.tensor([0.5, 0.5])), x
        (tensor([6], dtype=torch.uint8), tensor([ 0.0000, -0.2500]))
    """
    if not isinstance(noise, Tensor):
        table = _table(buffer, norms, block_size, bits, nearest=noise is None)
        if table is not None:
            return table.quantise(buffer, norms, noise)
    drawn = _stream(noise)
    packed = [
        quantise_reference(
            buffer[piece], norms[blocks], block_size, bits, _part(drawn, blocks, block_size)
        )
        for piece, blocks in pieces(buffer, block_size, bits)
    ]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def largest(buffer: Tensor, block_size: int) -> Tensor:
    """Return the largest magnitude of each block, ``(ceil(numel / block_size),)``."""
    if compiled(buffer, "levels"):
        from lightning_gc.kernels.host import levels as host

        return host.largest(buffer, block_size)
    # Norms can be cut for any width of codes; 1 means "narrower than a byte".
    parts = pieces(buffer, block_size, 1)
    return torch.cat([_rows_largest(in_blocks(buffer[i], block_size)) for i, _ in parts])


def _rows_largest(blocks: Tensor) -> Tensor:
    if not blocks.numel():
        return blocks.new_zeros(blocks.shape[0])
    if blocks.device.type == "cpu":  # magnitudes stay in the cache, where this is vectorised
        return blocks.abs().amax(dim=1)
    low, high = blocks.aminmax(dim=1)  # no tensor of magnitudes
    return torch.maximum(low.neg_(), high)


def pieces(tensor: Tensor, block_size: int, bits: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of ``(numel,)`` and of its blocks that can be coded independently.

    On the host pieces are short, so that intermediate tensors stay in the cache. Each piece
    consists of complete blocks and complete bytes. Codes of 8 bits and more lie in byte planes and
    are not cut.
    """
    numel, together = tensor.numel(), 8 * block_size
    size = -(-_PIECE // together) * together
    if tensor.device.type != "cpu" or bits >= 8 or numel <= size:
        yield slice(numel), slice(None)
        return
    for start in range(0, numel, size):
        yield slice(start, start + size), slice(start // block_size, (start + size) // block_size)


def _part(noise: Noise, blocks: slice, block_size: int) -> Noise:
    if not isinstance(noise, Tensor) or blocks.stop is None:
        return noise
    return noise[blocks.start * block_size : blocks.stop * block_size]


def _stream(noise: Noise) -> Noise:
    """Return a source that continues from piece to piece: on the host an SFC64 stream."""
    if isinstance(noise, torch.Generator) and noise.device.type == "cpu":
        return np.random.SFC64(noise.initial_seed())
    return noise


def _uniform(noise: Noise, like: Tensor) -> Tensor:
    """Return one number in [0, 1) per element of ``like``, or one for all."""
    if noise is None:
        return like.new_full((), 0.5)
    if isinstance(noise, Tensor):
        return noise.view(like.shape)
    if isinstance(noise, torch.Generator):
        return torch.rand(like.shape, generator=noise, device=like.device, dtype=like.dtype)
    words = np.asarray(noise.random_raw(-(-like.numel() // 2))).view(np.int32)[: like.numel()]
    words &= 0xFFFFFF
    drawn = torch.from_numpy(words).to(like.dtype).mul_(2.0**-24)
    return drawn.view(like.shape)


def quantise_reference(
    buffer: Tensor, norms: Tensor, block_size: int, bits: int, noise: Noise
) -> Tensor:
    """Compute the same with torch operations."""
    numel, column, s = buffer.numel(), norms.view(-1, 1), 2 ** (bits - 1) - 1
    blocks = in_blocks(buffer, block_size)  # (b, block_size), a copy if padded
    # A block of zeros has norm 0: its elements get level 0, not 0/0.
    ratio = blocks / column.where(column > 0, 1.0)
    levels = ratio.abs().mul_(s).add_(_uniform(_stream(noise), ratio)).floor_().clamp_(max=s)
    levels.copysign_(ratio)
    # Divided by a tensor: by a Python number CUDA would multiply with the inverse, 1 ulp off.
    steps = torch.full((), s, dtype=levels.dtype, device=levels.device)
    buffer.sub_((levels / steps).mul_(column).view(-1)[:numel])
    codes = levels.add_(s).view(-1)[:numel].to(torch.int32)  # NaN: the least int, low bits 0
    return pack(codes, bits)


def in_blocks(flat: Tensor, size: int) -> Tensor:
    """Return ``(b, size)``, the last block padded with zeros."""
    short = -flat.numel() % size
    padded = torch.nn.functional.pad(flat, (0, short)) if short else flat
    return padded.view(-1, size)


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
        ValueError: ``packed`` has a wrong length; ``check`` may raise its own errors.

    Example:
        >>> from lightning_gc.core import payload_validation
        >>> out, codes = torch.zeros(2), torch.tensor([6], dtype=torch.uint8)
        >>> dequantise(codes, torch.tensor([3.0]), 2, 2, out, 1.0, payload_validation.codes)
        >>> out
        tensor([3., 0.])
    """
    expected = packed_bytes(out.numel(), bits)
    if packed.shape != (expected,):
        raise ValueError(
            f"The codes take {expected} bytes, but a tensor of {tuple(packed.shape)} arrived."
        )
    table = _table(out, norms, block_size, bits)
    if table is not None and table.add((packed, norms), out, scale):
        return
    for piece, blocks in pieces(out, block_size, bits):
        whole = piece.start is None
        coded = packed if whole else packed[piece.start * bits // 8 : piece.stop * bits // 8]
        dequantise_reference(coded, norms[blocks], block_size, bits, out[piece], scale, check)


def dequantise_reference(
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
