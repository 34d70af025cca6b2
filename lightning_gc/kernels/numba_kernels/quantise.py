"""QSGD's encoder on the host: norms, random numbers, levels, errors and packed codes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.kernels.numba_kernels.float32 import copysign, floor, jit, magnitude

CHUNK = 2048  # elements whose codes and random numbers lie in the first cache


def largest(buffer: Tensor, block_size: int) -> Tensor:
    """Return the largest magnitude of each block, NaN if any is, ``(ceil(numel / size),)``."""
    norms = buffer.new_empty(-(-buffer.numel() // block_size))
    _largest(buffer.numpy().view(np.int32), block_size, norms.numpy().view(np.int32))
    return norms


def quantise(
    buffer: Tensor, norms: Tensor, block_size: int, bits: int, noise: torch.Generator | None
) -> Tensor:
    """As ``kernels.quantise.quantise``, for codes of at most 8 bits."""
    packed = torch.empty(
        packed_bytes(buffer.numel(), bits), dtype=torch.uint8, device=buffer.device
    )
    state = np.zeros(4, np.uint64)
    if noise is not None:
        stream = np.random.SFC64(noise.initial_seed())
        state = stream.state["state"]["state"]
    arrays = buffer.numpy(), norms.numpy(), packed.numpy()
    _quantise(*arrays, block_size, bits, state, noise is not None)
    return packed


@jit
def _largest(bits, block_size, norms):
    for block in range(norms.size):
        # Magnitudes are ordered like their bits, and NaN is above infinity.
        most = np.int32(0)
        for x in bits[block * block_size : (block + 1) * block_size]:
            most = max(most, x & np.int32(0x7FFFFFFF))
        norms[block] = most


@jit
def _quantise(x, norms, packed, block_size, bits, state, draw):
    s = np.float32(2 ** (bits - 1) - 1)
    noise = np.full(CHUNK, 0.5, np.float32)
    words = np.empty(CHUNK // 2, np.uint64)
    codes = np.empty(CHUNK, np.uint8)
    for start in range(0, x.size, CHUNK):
        stop = min(start + CHUNK, x.size)
        size = stop - start
        if draw:
            _sfc64(state, words[: (size + 1) // 2])
            _uniform(words.view(np.int32)[:size], noise[:size])
        at = start
        while at < stop:
            block = at // block_size
            end = min((block + 1) * block_size, stop)
            part = slice(at - start, end - start)
            _round(x[at:end], noise[part], codes[part], norms[block], s)
            at = end
        _pack(codes, size, bits, packed[start * bits // 8 : (stop * bits + 7) // 8])


@jit
def _sfc64(state, words):
    """Fill ``words`` with the next of an SFC64 generator, as NumPy has it."""
    a, b, c, count = state
    for i in range(words.size):
        word = a + b + count
        count += np.uint64(1)
        a = b ^ (b >> np.uint64(11))
        b = c + (c << np.uint64(3))
        c = ((c << np.uint64(24)) | (c >> np.uint64(40))) + word
        words[i] = word
    state[:] = a, b, c, count


@jit
def _uniform(words, out):
    for i in range(out.size):
        out[i] = np.float32(words[i] & np.int32(0xFFFFFF)) * np.float32(2.0**-24)


@jit
def _round(x, noise, codes, norm, s):
    divisor = norm if norm > np.float32(0) else np.float32(1)
    for i in range(x.size):
        ratio = x[i] / divisor
        level = floor(magnitude(ratio) * s + noise[i])
        level = copysign(s if level > s else level, ratio)
        x[i] -= (level / s) * norm
        code = level + s
        codes[i] = np.uint8(np.int32(code if code == code else np.float32(0)))  # NaN: 0


@jit
def _pack(codes, size, bits, packed):
    if bits == 8:
        packed[:] = codes[:size]
    elif bits == 4:
        codes[size : size + size % 2] = 0
        _pack_pairs(codes, packed)
    else:
        codes[size : (size + 7) // 8 * 8] = 0
        for group in range((size + 7) // 8):
            word = np.uint64(0)
            for i in range(8):
                word |= np.uint64(codes[8 * group + i]) << np.uint64(i * bits)
            for i in range(group * bits, min((group + 1) * bits, packed.size)):
                packed[i] = word & np.uint64(255)
                word >>= np.uint64(8)


@jit
def _pack_pairs(codes, packed):
    for i in range(packed.size):
        packed[i] = codes[2 * i] | (codes[2 * i + 1] << np.uint8(4))
