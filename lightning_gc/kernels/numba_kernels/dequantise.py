"""QSGD's decoder on the host: unpack codes and add their values to a tensor."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_gc.kernels.numba_kernels.float32 import jit, multiply_add

CHUNK = 2048


def dequantise(
    packed: Tensor, norms: Tensor, block_size: int, bits: int, out: Tensor, scale: float
) -> int:
    """Add ``scale · norm · (code − s) / s`` to ``out``, unless a code is above 2s.

    Codes have at most 8 bits; the highest is returned.
    """
    arrays = packed.numpy(), norms.numpy(), out.numpy()
    return int(_dequantise(*arrays, block_size, bits, np.float32(scale)))


@jit
def _dequantise(packed, norms, out, block_size, bits, scale):
    s = np.float32(2 ** (bits - 1) - 1)
    codes = np.empty(CHUNK, np.uint8)
    highest = _highest(packed, bits, codes, out.size)
    if highest > 2 * s:
        return highest
    for start in range(0, out.size, CHUNK):
        stop = min(start + CHUNK, out.size)
        _unpack(packed[start * bits // 8 : (stop * bits + 7) // 8], bits, codes)
        at = start
        while at < stop:
            block = at // block_size
            end = min((block + 1) * block_size, stop)
            _add(codes[at - start : end - start], out[at:end], norms[block], s, scale)
            at = end
    return highest


@jit
def _highest(packed, bits, codes, numel):
    highest = np.uint8(0)
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        _unpack(packed[start * bits // 8 : (stop * bits + 7) // 8], bits, codes)
        for code in codes[: stop - start]:
            highest = max(highest, code)
    return highest


@jit
def _unpack(packed, bits, codes):
    if bits == 8:
        codes[: packed.size] = packed
    elif bits == 4:
        _unpack_pairs(packed, codes)
    else:
        mask = np.uint64(2**bits - 1)
        for group in range((packed.size + bits - 1) // bits):
            word = np.uint64(0)
            for i in range(min(bits, packed.size - group * bits)):
                word |= np.uint64(packed[group * bits + i]) << np.uint64(8 * i)
            for i in range(8):
                codes[8 * group + i] = (word >> np.uint64(i * bits)) & mask


@jit
def _unpack_pairs(packed, codes):
    for i in range(packed.size):
        codes[2 * i] = packed[i] & np.uint8(15)
        codes[2 * i + 1] = packed[i] >> np.uint8(4)


@jit
def _add(codes, out, norm, s, scale):
    for i in range(out.size):
        level = np.float32(np.int32(codes[i])) - s
        out[i] = multiply_add((level / s) * norm, scale, out[i])
