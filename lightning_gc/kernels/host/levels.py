"""Kernels for the host that round parts of a bucket to levels of a block's norm."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lightning_gc.core.bit_packing import pack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.message import Packed
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.host.segments import (
    addresses,
    clean,
    compensate,
    copy,
    copysign,
    floor,
    jit,
    magnitude,
    multiply_add,
    pointer,
    poison,
    times,
    weights,
)
from lightning_gc.kernels.shards import LevelTable, Payloads

_NONE = np.zeros(1, np.bool_)
CHUNK = 2048  # elements whose codes and random numbers lie in the first cache


def largest(buffer: Tensor, block_size: int) -> Tensor:
    """Return the largest magnitude of each block, NaN if any is, ``(ceil(numel / size),)``."""
    norms = buffer.new_empty(-(-buffer.numel() // block_size))
    _largest(buffer.numpy().view(np.int32), block_size, norms.numpy().view(np.int32))
    return norms


class Table(LevelTable):
    """Encodes and decodes parts of a bucket in codes of at most 8 bits.

    An SFC64 stream draws the numbers of each part, as ``kernels.quantise.quantise`` says.
    """

    cuts = False

    @classmethod
    def takes(cls, bits: int, block_size: int, nearest: bool) -> bool:
        return bits <= 8

    @functools.cached_property
    def _rows(self) -> np.ndarray[Any, Any]:
        """First element, end, first byte, first block and place of each part; then both ends."""
        (rows,), ends = self.layout.rows, (0, 0, self.layout.codes, self.layout.blocks, 0)
        return np.array([*((r.start, r.stop, r.byte, r.block, r.place) for r in rows), ends])

    def quantise(self, buffer: Tensor, norms: Tensor, noise: torch.Generator | None) -> Tensor:
        packed = torch.empty(self.layout.codes, dtype=torch.uint8, device=buffer.device)
        state = np.zeros(4, np.uint64)
        if noise is not None:
            _seed(state, np.uint64(noise.initial_seed()))
        x = buffer.numpy()
        weighted = (x, np.float32(1), np.float32(1), False)
        of = self.block_size, self.bits, state, noise is not None, len(norms), weighted
        _quantise(x, norms.numpy(), packed.numpy(), *of)
        return packed

    def _encode(
        self, packed: Sequence[Packed], buffer: Tensor, bucket: Bucket, mine: int | None
    ) -> None:
        ((codes, norms, *_),), pending = packed, bucket.pending
        grad, idle, weighted = buffer, _NONE, (np.float32(1), np.float32(1))
        if pending is not None:
            grad = buffer if pending.grad is None else pending.grad
            idle, weighted = (pending.peaks == 0).numpy(), weights(pending)
        adds = pending is not None and pending.grad is not None
        names = [] if self.nearest else self.layout.names
        seeds = [bucket.generator_seed(shared=False, name=name) for name in names]
        arrays = buffer.numpy(), self._rows, np.array(seeds, np.uint64)
        sent = codes.numpy(), norms.numpy(), self.block_size, self.bits
        _encode(*arrays, *sent, grad.numpy(), idle, *weighted, adds)
        if pending is None:
            packed[0].padding.zero_()
        else:
            pending.end(packed[0])

    def average(
        self, payloads: Payloads, out: Tensor, pending: Pending | None, mine: int | None = None
    ) -> bool:
        sound = self._add(payloads, out, 1 / len(payloads), fresh=True)
        if pending is not None:
            poison(out, pending)
        return sound

    def add(self, payload: Payload, out: Tensor, scale: float) -> bool:
        return self._add([payload], out, scale, fresh=False)

    def _add(self, payloads: Payloads, out: Tensor, scale: float, *, fresh: bool) -> bool:
        codes, norms = ([t.contiguous() for t in each] for each in zip(*payloads, strict=True))
        arrays = addresses(codes), addresses(norms), out.numpy(), self._rows
        return bool(_add(*arrays, self.block_size, self.bits, np.float32(scale), fresh))


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
    if not fresh and _highest(codes, rows, bits, unpacked) > 2 * s:
        return False  # and nothing has been added
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


@jit
def _highest(codes, rows, bits, unpacked):
    highest = np.uint8(0)
    for part in range(rows.shape[0] - 1):
        numel, code = rows[part, 1] - rows[part, 0], rows[part, 2]
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)
            for worker in range(codes.size):
                packed = carray(pointer(codes[worker]), rows[-1, 2], np.uint8)[code:]
                unpack_codes(packed[start * bits // 8 : (stop * bits + 7) // 8], bits, unpacked)
                highest = max(highest, _most(unpacked[: stop - start]))
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


_NUMEL, _BLOCK = 5000, 48


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of all kernels for ``numbers``, ``(5000,)``, beside torch's."""
    norms = largest(numbers, _BLOCK)
    padded = torch.nn.functional.pad(numbers, (0, -_NUMEL % _BLOCK))
    yield norms, padded.view(-1, _BLOCK).abs().amax(1)
    wide = norms.repeat_interleave(_BLOCK)[:_NUMEL]
    bucket = Bucket(numbers, {"a": (_NUMEL,)})
    generator = bucket.generator(shared=False)
    words = np.random.SFC64(generator.initial_seed()).random_raw(_NUMEL // 2)
    random = torch.from_numpy(words.view(np.int32) & 0xFFFFFF).float() * 2.0**-24
    for bits, noise, u in ((4, generator, random), (8, None, 0.5), (3, None, 0.5)):
        s = torch.tensor(2.0 ** (bits - 1) - 1, dtype=torch.float32, device="cpu")
        ratio = numbers / wide.where(wide > 0, 1.0)
        levels = (ratio.abs() * s + u).floor().clamp(max=s).copysign(ratio)
        codes, value = pack((levels + s).to(torch.uint8), bits), levels / s * wide
        table = Table([("a", 0, 0, _NUMEL)], bits, _BLOCK, noise is None, numbers.device)
        left = numbers.clone()
        yield table.quantise(left, norms, noise), codes
        yield left, numbers - value
        left, out = numbers.clone(), numbers.clone()
        (sent,) = table.encode(left, bucket)
        yield sent[0], codes
        yield sent[1], norms
        yield left, numbers - value
        table.add(sent, out, 1 / 3)
        yield out, numbers.add(value, alpha=1 / 3)
        table.average([sent, sent, sent], out, None)
        third = torch.zeros_like(out).add(value, alpha=1 / 3)
        yield out, third.add(value, alpha=1 / 3).add(value, alpha=1 / 3)


ATTEMPTS = {"levels": _attempt}
