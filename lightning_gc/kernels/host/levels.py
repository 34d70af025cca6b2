"""Kernels for the host that round to levels of a block's norm: of one tensor, and of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lightning_gc.core.bit_packing import pack, packed_bytes
from lightning_gc.core.message import Packed, reserve
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.host.segments import (
    addresses,
    clean,
    compensate,
    pointer,
    poison,
    weights,
)
from lightning_gc.kernels.host.tensors import (
    copy,
    copysign,
    floor,
    jit,
    magnitude,
    multiply_add,
    times,
)

_NONE = np.zeros(1, np.bool_)
CHUNK = 2048  # elements whose codes and random numbers lie in the first cache


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
        _seed(state, np.uint64(noise.initial_seed()))
    x = buffer.numpy()
    weighted = (x, np.float32(1), np.float32(1), False)
    arrays = x, norms.numpy(), packed.numpy()
    _quantise(*arrays, block_size, bits, state, noise is not None, len(norms), weighted)
    return packed


class Table:
    """The parts of a bucket that share a payload of codes and norms.

    Args:
        parts: first element and end of each part, and its place among the bucket's parameters.
        bits: of a code, at most 8.
        block_size: elements that share a norm.
    """

    def __init__(self, parts: Sequence[tuple[int, int, int]], bits: int, block_size: int) -> None:
        self.bits, self.block_size = bits, block_size
        rows, codes, norms = [], 0, 0
        for start, stop, place in parts:
            rows.append((start, stop, codes, norms, place))
            codes += packed_bytes(stop - start, bits)
            norms -= -(stop - start) // block_size
        self.rows = np.array([*rows, (0, 0, codes, norms, 0)])
        self.fields = [(torch.uint8, codes), (torch.float32, norms)]

    def encode(
        self, buffer: Tensor, seeds: Sequence[int] | None, pending: Pending | None = None
    ) -> Packed:
        """Return codes and norms of all parts; without ``seeds`` rounded to the nearest.

        With ``pending`` as ``core.segments.Pending`` says.
        """
        if pending is None:
            packed = reserve(self.fields, buffer.device)
            given = buffer, _NONE, np.float32(1), np.float32(1)
        else:
            packed = pending.reserve(self.fields)
            grad = buffer if pending.grad is None else pending.grad
            given = grad, (pending.peaks == 0).numpy(), *weights(pending)
        grad, idle, *weighted = given
        adds = pending is not None and pending.grad is not None
        arrays = buffer.numpy(), self.rows, np.array(seeds or [], np.uint64)
        sent = packed[0].numpy(), packed[1].numpy(), self.block_size, self.bits
        _encode(*arrays, *sent, grad.numpy(), idle, *weighted, adds)
        if pending is not None:
            pending.end(packed)
        return packed.first(2)

    def add(
        self,
        payloads: Sequence[Sequence[Tensor]],
        out: Tensor,
        scale: float,
        pending: Pending | None = None,
        *,
        fresh: bool,
    ) -> bool:
        """Add ``scale`` times all payloads to the parts of ``out``, or to zeros if ``fresh``.

        Returns:
            False if a code is above 2s, which no encoder makes.
        """
        codes, norms = ([t.contiguous() for t in each] for each in zip(*payloads, strict=True))
        arrays = addresses(codes), addresses(norms), out.numpy(), self.rows
        sound = bool(_add(*arrays, self.block_size, self.bits, np.float32(scale), fresh))
        if pending is not None:
            poison(out, pending)
        return sound


@jit
def _encode(x, rows, seeds, codes, norms, block_size, bits, grad, idle, decay, gain, add):
    state = np.zeros(4, np.uint64)
    for part in range(rows.shape[0] - 1):
        start, stop, code, norm, place = rows[part]
        if seeds.size:
            _seed(state, seeds[part])
        mine, new = x[start:stop], grad[start:stop]
        given = mine
        if add and idle[place]:
            compensate(mine, new, decay, gain)
            clean(mine)
            given = np.zeros(stop - start, np.float32)
        weighted = (new, decay, gain, add and not idle[place])
        own = norms[norm : rows[part + 1, 3]]
        packed = codes[code : rows[part + 1, 2]]
        _quantise(given, own, packed, block_size, bits, state, seeds.size > 0, 0, weighted)


@jit
def _add(codes, norms, out, rows, block_size, bits, scale, fresh):
    s = np.float32(2 ** (bits - 1) - 1)
    unpacked = np.empty(CHUNK, np.uint8)
    highest = np.uint8(0)
    for part in range(rows.shape[0] - 1):
        first, end, code, norm, _ = rows[part]
        for start in range(0, end - first, CHUNK):
            stop = min(start + CHUNK, end - first)
            mean = out[first + start : first + stop]
            if fresh:
                mean[:] = 0
            for worker in range(codes.size):
                packed = carray(pointer(codes[worker]), rows[-1, 2], np.uint8)[code:]
                own = carray(pointer(norms[worker]), rows[-1, 3], np.float32)[norm:]
                unpack_codes(packed[start * bits // 8 : (stop * bits + 7) // 8], bits, unpacked)
                highest = max(highest, _most(unpacked[: stop - start]))
                _add_blocks(unpacked, mean, own, start, block_size, s, scale)
    return highest <= 2 * s


@jit
def _most(codes):
    highest = np.uint8(0)
    for code in codes:
        highest = max(highest, code)
    return highest


@jit
def _add_blocks(codes, out, norms, start, block_size, s, scale):
    """Add codes of the elements from ``start`` on, ``(out.size,)``."""
    at = 0
    while at < out.size:
        block = (start + at) // block_size
        end = min((block + 1) * block_size - start, out.size)
        _add_levels(codes[at:end], out[at:end], norms[block], s, scale)
        at = end


@jit
def _mixed(value):
    return value ^ (value >> np.uint32(16))


@jit
def _seed(state, seed):
    """Set an SFC64 generator to the state that NumPy's ``SFC64(seed)`` has."""
    words, pool = state.view(np.uint32), np.zeros(4, np.uint32)
    pool[0], pool[1] = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    constant = np.uint32(0x43B0D7E5)
    for i in range(4):
        value = pool[i] ^ constant
        constant = times(constant, np.uint32(0x931E8875))
        pool[i] = _mixed(times(value, constant))
    for source in range(4):
        for target in range(4):
            if source != target:
                value = pool[source] ^ constant
                constant = times(constant, np.uint32(0x931E8875))
                value = times(_mixed(times(value, constant)), np.uint32(0x4973F715))
                pool[target] = np.uint32(times(pool[target], np.uint32(0xCA01F9DD)) - value)
                pool[target] = _mixed(pool[target])
    constant = np.uint32(0x8B51F9DD)
    for i in range(6):
        value = pool[i % 4] ^ constant
        constant = times(constant, np.uint32(0x58F38DED))
        words[i] = _mixed(times(value, constant))
    state[3] = 1
    _sfc64(state, np.empty(12, np.uint64))


@jit
def _largest(bits, block_size, norms):
    for block in range(norms.size):
        # Magnitudes are ordered like their bits, and NaN is above infinity.
        most = np.int32(0)
        for x in bits[block * block_size : (block + 1) * block_size]:
            most = max(most, x & np.int32(0x7FFFFFFF))
        norms[block] = most


@jit
def _quantise(x, norms, packed, block_size, bits, state, draw, known, weighted):
    """Round and pack x; the first ``known`` norms are given, and the others are found here.

    ``weighted`` has a gradient, both weights, and whether x is an error to compensate by them.
    """
    grad, decay, gain, add = weighted
    s = np.float32(2 ** (bits - 1) - 1)
    noise = np.full(CHUNK, 0.5, np.float32)
    words = np.empty(CHUNK // 2, np.uint64)
    codes = np.empty(CHUNK, np.uint8)
    for start in range(0, x.size, CHUNK):
        stop = min(start + CHUNK, x.size)
        size = stop - start
        end = (stop + block_size - 1) // block_size
        if end > known:
            found = slice(known * block_size, end * block_size)
            if add:
                compensate(x[found], grad[found], decay, gain)
            _largest(x[found].view(np.int32), block_size, norms[known:end].view(np.int32))
            known = end
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
        if add:
            clean(x[start:stop])
        pack_codes(codes, size, bits, packed[start * bits // 8 : (stop * bits + 7) // 8])


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
    state[0], state[1], state[2], state[3] = a, b, c, count


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
def pack_codes(codes, size, bits, packed):
    """Pack the first ``size`` codes; up to seven behind them are overwritten."""
    if bits == 8:
        copy(codes[:size], packed)
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
        unpack_codes(packed[start * bits // 8 : (stop * bits + 7) // 8], bits, codes)
        _add_blocks(codes, out[start:stop], norms, start, block_size, s, scale)
    return highest


@jit
def _highest(packed, bits, codes, numel):
    highest = np.uint8(0)
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        unpack_codes(packed[start * bits // 8 : (stop * bits + 7) // 8], bits, codes)
        highest = max(highest, _most(codes[: stop - start]))
    return highest


@jit
def unpack_codes(packed, bits, codes):
    """Write the codes in ``packed`` to the first of ``codes``, and up to seven more."""
    if bits == 8:
        copy(packed, codes)
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


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of all kernels for ``numbers``, ``(5000,)``, beside torch's."""
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
        value = (codes - s) / s * wide
        yield out, numbers.add(value, alpha=1 / 3)
        table, left = Table([(0, _NUMEL, 0)], bits, _BLOCK), numbers.clone()
        whole = table.encode(left, None if noise is None else [_SEED])
        yield whole[0], packed
        yield whole[1], norms
        yield left, numbers - levels / s * wide
        table.add([whole, whole, whole], out, 1 / 3, fresh=True)
        third = torch.zeros_like(out).add(value, alpha=1 / 3)
        yield out, third.add(value, alpha=1 / 3).add(value, alpha=1 / 3)


ATTEMPTS = {"levels": _attempt}
