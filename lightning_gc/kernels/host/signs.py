"""Kernels for the host that send a bit per element of a bucket and the means of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.bit_packing import pack
from lightning_gc.core.segments import PIECE
from lightning_gc.kernels.host.tensors import jit, magnitude, multiply_add
from lightning_gc.kernels.signs import LANES, SUMS

_BLOCK = 2048  # elements whose signs lie in the first cache
_SPREAD = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint8).view(np.uint64)[:, 0]
"""Of each byte the eight bits, a byte each."""


def mean(numbers: Tensor, share: float) -> Tensor:
    """Return the sum of ``numbers / PIECE`` times ``share``; see ``kernels.signs.mean``."""
    sums = np.empty(-(-numbers.numel() // PIECE), np.float32)
    return torch.tensor(
        _mean(numbers.numpy(), _AS_IS, np.float32(share), sums), dtype=torch.float32, device="cpu"
    )


def encode(
    buffer: Tensor, places: np.ndarray, nbytes: int, split: bool
) -> tuple[Tensor, Tensor]:  # (nbytes,) uint8, (means,) float32
    """Move signs and means out of ``buffer``.

    Args:
        buffer: of the whole bucket, changed in place.
        places: first element, end and first byte of each parameter, ``(n, 3)`` int64.
        nbytes: of the signs.
        split: as for ``kernels.gpu.signs.encode``.
    """
    signs = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    means = buffer.new_empty(len(places) * (2 if split else 1))
    most = int((places[:, 1] - places[:, 0]).max())
    sums = np.empty(-(-most // PIECE), np.float32)
    _encode(buffer.numpy(), places, signs.numpy(), means.numpy(), sums, split)
    return signs, means


def average(
    payloads: Sequence[Sequence[Tensor]], out: Tensor, places: np.ndarray, split: bool
) -> None:
    """Write the mean of all workers' payloads to the parameters in ``out``."""
    share = np.float32(1 / len(payloads))
    for sender, (signs, means) in enumerate(payloads):
        given = out.numpy(), places, signs.numpy(), means.numpy()
        _add(*given, share, split, sender == 0, _SPREAD)


_AS_IS, _MAGNITUDES, _BELOW, _ABOVE = range(4)


@jit
def _mean(x, kind, share, sums):
    """Return the sum of a kind of ``x / PIECE`` times ``share``, in the order of all kernels."""
    lanes = np.empty(LANES, np.float32)
    pieces = (x.size + PIECE - 1) // PIECE
    for piece in range(pieces):
        start, stop = piece * PIECE, min((piece + 1) * PIECE, x.size)
        width = min(stop - start, LANES)
        lanes[:width] = 0
        for row in range(start, stop, LANES):
            _add_row(x[row : min(row + LANES, stop)], kind, lanes)
        sums[piece] = in_pairs(lanes, width) * share
    width = min(pieces, SUMS)
    lanes[:width] = 0
    for row in range(0, pieces, SUMS):
        for i in range(min(SUMS, pieces - row)):
            lanes[i] += sums[row + i]
    return in_pairs(lanes, width)


@jit
def _add_row(x, kind, lanes):
    scale = np.float32(1 / PIECE)
    if kind == _AS_IS:
        for i in range(x.size):
            lanes[i] += x[i] * scale
    elif kind == _MAGNITUDES:
        for i in range(x.size):
            lanes[i] += magnitude(x[i] * scale)
    elif kind == _BELOW:
        for i in range(x.size):
            lanes[i] += np.float32(0) if x[i] > 0 else x[i] * scale
    else:
        for i in range(x.size):
            lanes[i] += np.float32(0) if x[i] < 0 else x[i] * scale


@jit
def in_pairs(lanes, width):
    """Return the sum of the first ``width`` lanes: of neighbours, again and again."""
    while width > 1:
        half = width // 2
        for i in range(half):
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1]
        if width % 2:
            lanes[half] = lanes[width - 1] + np.float32(0)
        width -= half
    return lanes[0]


@jit
def _encode(x, places, signs, means, sums, split):
    flags = np.empty(_BLOCK, np.uint8)
    one, scale = np.float32(1), np.float32(PIECE)
    for part in range(places.shape[0]):
        start, stop, byte = places[part]
        own = x[start:stop]
        if split:
            negative = 0
            for i in range(own.size):
                negative += 1 if own[i] < 0 else 0
            below = _mean(own, _BELOW, scale * (one / np.float32(max(negative, 1))), sums)
            others = max(own.size - negative, 1)
            above = _mean(own, _ABOVE, scale * (one / np.float32(others)), sums)
            means[2 * part], means[2 * part + 1] = below, above
        else:
            above = _mean(own, _MAGNITUDES, scale * (one / np.float32(own.size)), sums)
            below = -above
            means[part] = above
        for at in range(0, own.size, _BLOCK):
            end = min(at + _BLOCK, own.size)
            _take(own[at:end], below, above, flags)
            flags[end - at : (end - at + 7) // 8 * 8] = 0
            _gather(flags.view(np.uint64), signs[byte + at // 8 : byte + (end + 7) // 8])


@jit
def _take(x, below, above, flags):
    for i in range(x.size):
        positive = x[i] >= 0  # not NaN
        x[i] -= above if positive else below
        flags[i] = positive


@jit
def _gather(words, signs):
    for i in range(signs.size):
        signs[i] = (words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56)


@jit
def _add(out, places, signs, means, share, split, first, spread):
    flags = np.empty(_BLOCK, np.uint8)
    words = flags.view(np.uint64)
    for part in range(places.shape[0]):
        start, stop, byte = places[part]
        above = means[2 * part + 1] if split else means[part]
        below = means[2 * part] if split else -above
        # Rounded once, as a product that is added to 0.
        low, high = below * share + np.float32(0), above * share + np.float32(0)
        for at in range(start, stop, _BLOCK):
            end = min(at + _BLOCK, stop)
            own = signs[byte + (at - start) // 8 : byte + (end - start + 7) // 8]
            for i in range(own.size):
                words[i] = spread[own[i]]
            if first:
                _set(out[at:end], flags, low, high)
            else:
                _add_levels(out[at:end], flags, below, above, share)


@jit
def _set(out, flags, low, high):
    for i in range(out.size):
        out[i] = high if flags[i] else low


@jit
def _add_levels(out, flags, below, above, share):
    for i in range(out.size):
        out[i] = multiply_add(above if flags[i] else below, share, out[i])


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of all kernels for ``numbers`` beside torch's."""
    from lightning_gc.kernels import signs as reference

    size = numbers.numel()
    share = PIECE * float(np.float32(1) / np.float32(size))
    negative = numbers < 0
    magnitude = reference.by_torch(numbers.abs(), share)
    yield mean(numbers.abs(), share), magnitude
    fewer = negative.sum()
    halves = (numbers.clamp(max=0), fewer), (numbers.clamp(min=0), size - fewer)
    split = [reference.by_torch(x, float(PIECE / count.float())) for x, count in halves]
    places, nbytes = np.array([[0, size, 0]]), -(-size // 8)
    for levels, two in (([-magnitude, magnitude], False), (split, True)):
        left, out = numbers.clone(), numbers.clone()
        signs, means = encode(left, places, nbytes, two)
        sent = torch.where(negative, levels[0], levels[1])
        yield signs, pack((~negative).to(torch.uint8), 1)
        yield means, torch.stack(levels[-1 - two :])
        yield left, numbers - sent
        average([(signs, means)] * 3, out, places, two)
        third = torch.zeros_like(sent).add_(sent, alpha=1 / 3)
        yield out, third.add_(sent, alpha=1 / 3).add_(sent, alpha=1 / 3)


ATTEMPTS = {"signs": _attempt}
