"""Kernels for the host, compiled by numba: one pass over a tensor where torch needs several.

They give the bits of torch's operations, so workers with and without numba can train together. The
module is imported when first used, and compiled code is kept on disk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from lightning_gc.core.bit_packing import pack, packed_bytes

CHUNK = 2048  # elements whose codes and random numbers lie in the first cache
jit = numba.njit(nogil=True, cache=True)
"""Compiles a kernel; other threads run meanwhile."""


def _operation(name: str, arguments: int) -> Callable[..., Any]:
    """Return LLVM's operation ``name`` for this number of float32 arguments."""
    number = ir.FloatType()
    kind = ir.FunctionType(number, [number] * arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic(name, [number], kind), values)

    if arguments == 1:
        return intrinsic(lambda typing, x: (types.float32(x), generate))
    return intrinsic(lambda typing, x, y: (types.float32(x, y), generate))


magnitude = _operation("llvm.fabs", 1)
floor = _operation("llvm.floor", 1)
copysign = _operation("llvm.copysign", 2)


@intrinsic
def multiply_add(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return ``x·y + z``, rounded once, as torch adds with a factor."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(x, y, z), generate


def round_to_bfloat16(buffer: Tensor) -> Tensor:
    """Return ``buffer`` as bfloat16, ``(numel,)``, and leave the rounding error in ``buffer``."""
    rounded = torch.empty(buffer.shape, dtype=torch.bfloat16, device=buffer.device)
    numbers = buffer.numpy()
    _round_to_bfloat16(
        numbers, numbers.view(np.uint32), rounded.view(torch.int16).numpy().view(np.uint16)
    )
    return rounded


def add_bfloat16(out: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale`` times bfloat16 ``values`` to ``out``, both ``(numel,)``."""
    _add_bfloat16(out.numpy(), values.view(torch.int16).numpy().view(np.uint16), np.float32(scale))


@jit
def _round_to_bfloat16(x, bits, rounded):
    wide = np.empty(1024, np.uint32)
    for start in range(0, x.size, wide.size):
        stop = min(start + wide.size, x.size)
        part = slice(start, stop)
        upper_half(bits[part], rounded[part])
        widen(rounded[part], wide)
        subtract(x[part], wide.view(np.float32))


@jit
def upper_half(bits, rounded):
    """Round to the nearest, and halves to even; NaN stays NaN."""
    for i in range(bits.size):
        x = bits[i]
        nearest = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded[i] = np.uint16(np.uint32(0x7FC0) if is_nan else nearest)


@jit
def widen(rounded, wide):
    """Write bfloat16 numbers, given as uint16, to ``wide`` as bits of float32."""
    for i in range(rounded.size):
        wide[i] = np.uint32(rounded[i]) << np.uint32(16)


@jit
def subtract(x, rounded):
    """Subtract ``rounded`` from ``x``."""
    for i in range(x.size):
        x[i] -= rounded[i]


@jit
def _add_bfloat16(out, values, scale):
    wide = np.empty(1024, np.uint32)
    for start in range(0, out.size, wide.size):
        part = slice(start, min(start + wide.size, out.size))
        widen(values[part], wide)
        _add_wide(out[part], wide.view(np.float32), scale)


@jit
def _add_wide(out, values, scale):
    for i in range(out.size):
        out[i] = multiply_add(values[i], scale, out[i])


def largest(buffer: Tensor, block_size: int) -> Tensor:
    """Return the largest magnitude of each block, NaN if any is, ``(ceil(numel / size),)``."""
    norms = buffer.new_empty(-(-buffer.numel() // block_size))
    _largest(buffer.numpy().view(np.int32), block_size, norms.numpy().view(np.int32))
    return norms


def quantise(
    buffer: Tensor, norms: Tensor, block_size: int, bits: int, noise: torch.Generator | None
) -> Tensor:
    """Do as ``kernels.quantise.quantise``, for codes of at most 8 bits."""
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
            _add_levels(codes[at - start : end - start], out[at:end], norms[block], s, scale)
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
def _add_levels(codes, out, norm, s, scale):
    for i in range(out.size):
        level = np.float32(np.int32(codes[i])) - s
        out[i] = multiply_add((level / s) * norm, scale, out[i])


_NUMEL, _BLOCK, _SEED = 5000, 48, 1


def self_test() -> None:
    """Compare every kernel with torch on a small tensor; this compiles missing kernels.

    An unknown compiler or processor may not run a kernel, or may contract arithmetic. Workers
    without numba would then decode other bits.

    Raises:
        ArithmeticError: a kernel's result differs from torch's.
    """
    numbers = torch.linspace(-1, 1, _NUMEL, dtype=torch.float32, device="cpu").pow(3)
    numbers[96:240] = 0
    from lightning_gc.kernels.host import signs

    attempts = {
        "bfloat16": _bfloat16_attempt,
        "quantise": _quantise_attempt,
        "signs": signs.attempt,
    }
    for name, attempt in attempts.items():
        for ours, theirs in attempt(numbers):
            if not torch.equal(ours, theirs):
                raise ArithmeticError(f"the result of {name} differs from torch's")


def _bfloat16_attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    left, rounded = numbers.clone(), numbers.to(torch.bfloat16)
    values = round_to_bfloat16(left)
    yield values, rounded
    yield left, numbers - rounded
    out = numbers.clone()
    add_bfloat16(out, values, 1 / 3)
    yield out, numbers.add(rounded, alpha=1 / 3)


def _quantise_attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    norms = largest(numbers, _BLOCK)
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
        packed = quantise(left, norms, _BLOCK, bits, noise)
        yield packed, pack(codes, bits)
        yield left, numbers - levels / s * wide
        out = numbers.clone()
        dequantise(packed, norms, _BLOCK, bits, out, 1 / 3)
        yield out, numbers.add((codes - s) / s * wide, alpha=1 / 3)
