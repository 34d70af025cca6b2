"""Rounding at random to multiples of a number, and an entropy-coded payload of them.

``k_i = floor(x_i/unit + u_i)`` with u_i uniform in [0, 1), so that ``E unit·k_i = x_i``. Gaps
between the k_i that are not 0, and their magnitudes, go by Golomb-Rice codes with a parameter per
tensor, signs a bit each. An element of 16 or more times the median magnitude (a power of two next
to it) goes as it is, in float32: magnitudes decide that, not what was drawn, so the result stays
unbiased.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors.base import Waits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.core import Bucket, Field, Payload, Wire, payload_validation
from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.core.elias_fano import check_count
from lightning_gc.core.golomb_rice import decode, encode, low_bytes
from lightning_gc.kernels.accumulate import accumulate

_LOW = 10  # most low bits of a level
_HIGH = 16  # highest high part of a level
_SAMPLE = 16  # log2 of the elements that the low bits are chosen by, about
_PIECE = 1 << 16  # elements, so that what is made of them stays in the cache
_LARGEST = 2.0**127  # what is larger is never rounded up: it might leave float32
WAITS = Waits(3, 6)


def take(buffer: Tensor, unit: float, bucket: Bucket) -> Payload:
    """Move multiples of ``unit``, above 0 and a float32, out of ``buffer``, drawn at random.

    The random numbers are the bucket's private ones. On CUDA the host waits for lengths.
    """
    low = _low_bits(buffer, unit)
    limit = min((_HIGH << low) * unit, _LARGEST)
    whole = sparse_codec.take(buffer, topk_selection.reaching(buffer, limit))
    found, levels = _draw(buffer, unit, bucket.generator(shared=False))
    buffer[found] -= levels.to(buffer.dtype) * unit
    gaps = found.diff(prepend=found.new_full((1,), -1)) - 1
    gap_low = _gap_low(found.numel(), buffer.numel())
    return (
        *whole,
        torch.cat(encode(gaps, gap_low)),
        *encode(levels.abs() - 1, low),
        *sign_payload.pack_signs(levels < 0),
    )


def add(payload: Payload, unit: float | Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale`` times a payload of ``take`` to ``out``.

    Raises:
        ValueError: what no sender makes, where values can be read on the host.
    """
    values, positions, *levels = payload
    large = sparse_codec.places((values.to(out.dtype), positions), out.numel())
    others = _places(tuple(levels), unit, out)
    accumulate(out, *large, scale)
    accumulate(out, *others, scale)


def fields(numel: int) -> Wire:
    """Return the format of ``take``."""
    values, positions = sparse_codec.wire(numel, numel, "worker")
    byte, groups = torch.uint8, -(-numel // 8)
    gap_bytes = packed_bytes(numel, 2) + 2  # at most 1.4 bits an element, in two parts
    return (
        values,
        positions,
        Field("gaps", byte, gap_bytes, "worker", "between levels that are not 0, Golomb-Rice"),
        Field("low parts", byte, _LOW * groups, "worker", "of levels: their last bits"),
        Field("high parts", byte, (_HIGH + 1) * groups, "worker", "of levels, unary"),
        *sign_payload.sign_fields(numel),
    )


def count(payload: Payload) -> int:
    """Return how many elements a payload carries."""
    return payload[0].numel() + sign_payload.count(payload)


def _low_bits(buffer: Tensor, unit: float) -> int:
    """Return the log2 of the median level's magnitude that is to be expected, rounded."""
    sample = buffer[:: (buffer.numel() >> _SAMPLE) | 1].abs().double()
    sample = sample.div_(unit).nan_to_num_(0.0)
    counts = [(sample >= 1).sum(), sample.where(sample < 1, 0.0).sum()]
    sure, by_chance = torch.stack(counts).tolist()  # float64, as the sample
    if sure <= by_chance:
        return 0
    median = float(topk_selection.kth_largest(sample, max(1, int((sure + by_chance) / 2))))
    return round(math.log2(min(median, 2**_LOW)))


def _draw(buffer: Tensor, unit: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the positions of levels other than 0, ascending, and these, ``(c,)`` int64."""
    numel = buffer.numel()
    host = buffer.device.type == "cpu"
    numbers = np.random.Generator(np.random.SFC64(random.initial_seed()))
    size = _PIECE if host else max(1, numel)
    positions, levels = [], []
    for start in range(0, max(1, numel), size):  # one empty piece of an empty tensor
        # float64: single precision has few fractions of a step beside thousands of them.
        drawn = buffer[start : start + size].to(torch.float64, copy=True).div_(unit)
        if host:
            drawn.add_(torch.from_numpy(numbers.random(drawn.numel())))
        else:
            drawn.add_(
                torch.rand(drawn.shape, generator=random, dtype=drawn.dtype, device=drawn.device)
            )
        found = topk_selection.reaching(drawn.floor_(), 0.5)
        positions.append(found + start)
        levels.append(drawn[found].long())
    return torch.cat(positions), torch.cat(levels)


def _places(payload: Payload, unit: float | Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending positions, and the multiples of ``unit`` to add there."""
    gaps, low_parts, high_parts, *signs = payload
    count, numel = sign_payload.count(payload), out.numel()
    check_count(count, numel)
    if not count:
        payload_validation.lengths((gaps, high_parts), 0, 0)
    look = payload_validation.on_host(gaps)
    low = min(_LOW, low_parts.numel() // max(1, low_bytes(count, 1)))
    payload_validation.lengths((low_parts,), low_bytes(count, low))
    highest = _HIGH << low  # one more than there should be: limits are rounded to float32
    levels = decode(low_parts, high_parts, count, low, highest + 1, look)
    multiples = (levels + 1).to(out.dtype).mul_(unit)
    multiples = payload_validation.codes(levels, highest, multiples)
    negative = sign_payload.unpack_signs(tuple(signs))
    multiples = torch.where(negative, -multiples, multiples)

    gap_low = _gap_low(count, numel)
    cut = low_bytes(count, gap_low)
    between = decode(gaps[:cut], gaps[cut:], count, gap_low, numel, look)
    return payload_validation.positions((between + 1).cumsum(0) - 1, multiples, numel)


def _gap_low(count: int, numel: int) -> int:
    """Return the number of low bits of gaps, from the mean gap, which receivers know too."""
    return max(0, ((numel - count) // max(1, count)).bit_length() - 1)
