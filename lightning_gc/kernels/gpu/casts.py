"""Triton kernels that round a whole bucket to 16-bit floats, and average what has arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.message import Packed, evenly
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.launch import end_message, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.segments import (
    ROW,
    arrived,
    compensated,
    flags_of,
    given,
    left_of,
    piece_of,
    sample,
)


@triton.jit
def to_half(x, BFLOAT: tl.constexpr):
    """Return the bits of the nearest 16-bit floats, int16; halves to even."""
    if BFLOAT:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(magnitude_bits(x) > 0x7F800000, 0x7FC0, nearest).to(tl.int16)
    else:
        most = tl.zeros_like(x) + 65504.0
        inside = tl.where(x > most, most, tl.where(x < -most, -most, x))  # NaN stays
        half = inside.to(tl.float16).to(tl.int16, bitcast=True)
    return half


@triton.jit
def from_half(half, BFLOAT: tl.constexpr):
    """Return 16-bit floats, given as int16, in float32."""
    if BFLOAT:
        x = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = half.to(tl.float16, bitcast=True).to(tl.float32)
    return x


@kernel()
def round_pieces(
    buffer, grad, decay, gain, peaks,
    pieces, halves,
    flag, sent_flag, padding, length,
    ADD: tl.constexpr, BFLOAT: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write a piece as 16-bit floats; with a gradient to add, leave the rounding error."""
    piece = tl.program_id(0)
    if piece == 0:
        end_message(flag, sent_flag, padding, length)
    part, at, stop, _ = piece_of(pieces, piece)
    idle = tl.load(peaks + part) == 0.0
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        half = to_half(x, BFLOAT)
        if ADD:
            half = tl.where(idle, tl.zeros([ROW], tl.int16), half)
        tl.store(halves + here, half, mask=inside)
        if ADD:
            left = left_of(x, from_half(half, BFLOAT), x, idle, piece < 0, ADD)
            tl.store(buffer + here, left, mask=inside)
        at += ROW


@kernel()
def average_pieces(
    halves, apart, workers, share, out,
    flags, flags_apart, senders, starts, pieces,
    BFLOAT: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write a piece of the mean: all workers' values, in their order."""
    part, at, stop, _ = piece_of(pieces, tl.program_id(0))
    begin = tl.load(starts + part)
    bad = arrived(flags, flags_apart, senders)
    weight = tl.zeros([ROW], tl.float32) + share
    while at < stop:
        here = at + tl.arange(0, ROW)
        total = tl.zeros([ROW], tl.float32)
        sender = 0
        while sender < workers:
            half = tl.load(halves + sender * apart.to(tl.int64) + here, mask=here < stop, other=0)
            total = tl.fma(from_half(half, BFLOAT), weight, total)  # as torch adds with a factor
            sender += 1
        tl.store(out + here, tl.where(here == begin, total + bad, total), mask=here < stop)
        at += ROW


def encode(buffer: Tensor, dtype: torch.dtype, pending: Pending) -> Packed:
    """Return the payload (values,) of ``Cast``, as ``core.segments.Pending`` says."""
    packed = pending.reserve([(dtype, buffer.numel())])
    pieces = pending.segments.pieces
    launch(
        round_pieces,
        (len(pieces),),
        *(*given(buffer, pending), pieces),
        *(packed[0].view(torch.int16), *pending.ending(packed)),
        ADD=pending.grad is not None,
        BFLOAT=dtype == torch.bfloat16,
        ROW=ROW,
    )
    return packed.first(1)


def average(payloads: Sequence[Tensor], out: Tensor, pending: Pending) -> None:
    """Write the mean of all workers' values to ``out``."""
    values, apart = evenly(payloads)
    pieces = pending.segments.pieces
    launch(
        average_pieces,
        (len(pieces),),
        *(values.view(torch.int16), apart, len(payloads), 1 / len(payloads), out),
        *(*flags_of(pending, out), pending.segments.starts, pieces),
        BFLOAT=values.dtype == torch.bfloat16,
        ROW=ROW,
    )


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for dtype in (torch.bfloat16, torch.float16):
        pending, left, out = sample(numbers), numbers.clone(), numbers.clone()
        payload = encode(left, dtype, pending)
        x = 0.5 * numbers + numbers.flip(0)
        sent = torch.cat([x[:500], torch.zeros_like(x[500:])]).to(dtype)
        yield payload[0].float(), sent.float()
        yield left, x - sent
        average([payload[0], payload[0]], out, pending)
        yield out, sent.float()


ATTEMPTS = {"casts": _attempt}
