"""Triton kernels that send elements at random positions, which ``kernels.permutation`` draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.message import Packed, evenly
from lightning_gc.core.segments import PIECE, Pending
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, word
from lightning_gc.kernels.gpu.segments import ROW, arrived, compensated, flags_of, given, sample
from lightning_gc.kernels.permutation import ROUNDS, first, shift_of

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def part_of(hashed, size):
    """Return a number below ``size`` for 32 random bits."""
    return ((hashed.to(tl.uint64) * size.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def place_of(rank, numel, shift, low, high):
    """Return positions for ranks, uint32: the permutation."""
    x = rank
    a = numel >> shift
    ones = (tl.zeros_like(numel) + 1 << shift) - 1
    for i in tl.static_range(_ROUNDS):
        one = word(low, high, 3 * i)
        two = word(low, high, 3 * i + 1)
        row = x >> shift
        column = x & ones
        moved = row + part_of((column ^ two) * (one | 1), a)
        moved = tl.where(moved >= a, moved - a, moved)
        turned = column ^ (((moved ^ one) * (two | 1)) >> (32 - shift) & ones)
        x = tl.where(row < a, (moved << shift) | turned, x)
        x = x + part_of(word(low, high, 3 * i + 2), numel)
        x = tl.where(x >= numel, x - numel, x)
    return x


@triton.jit
def rank_of(place, numel, shift, low, high):
    """Return ranks of positions, uint32: the inverse of ``place_of``."""
    x = place
    a = numel >> shift
    ones = (tl.zeros_like(numel) + 1 << shift) - 1
    for i in tl.static_range(_ROUNDS - 1, -1, -1):
        one = word(low, high, 3 * i)
        two = word(low, high, 3 * i + 1)
        back = part_of(word(low, high, 3 * i + 2), numel)
        x = tl.where(x >= back, x - back, x + (numel - back))
        row = x >> shift
        turned = x & ones
        column = turned ^ (((row ^ one) * (two | 1)) >> (32 - shift) & ones)
        back = part_of((column ^ two) * (one | 1), a)
        moved = tl.where(row >= back, row - back, row + (a - back))
        x = tl.where(row < a, (moved << shift) | column, x)
    return x


@triton.jit
def unsigned(place):
    """Return a number of a table, uint32."""
    return tl.load(place).to(tl.uint32, bitcast=True)


@kernel()
def take_drawn(
    buffer, grad, decay, gain, peaks,
    table, step,
    values,
    flag, sent_flag, padding, length,
    ADD: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write drawn elements of a piece, leave the others, and zero where the mean will be."""
    piece = tl.program_id(0)
    if piece == 0:
        end_message(flag, sent_flag, padding, length)
    row = table + 11 * piece
    idle = tl.load(peaks + tl.load(row)) == 0.0
    at, stop, begin = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    numel, shift, k = unsigned(row + 4), unsigned(row + 5), unsigned(row + 6)
    own = values + tl.load(row + 7)
    low = unsigned(row + 8)
    high = unsigned(row + 9) + step.to(tl.uint32) * 0x85EBCA6B
    factor = tl.load(row + 10).to(tl.float32, bitcast=True)
    while at < stop:
        here = at + tl.arange(0, ROW)
        inside = here < stop
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        rank = rank_of((here - begin).to(tl.uint32), numel, shift, low, high)
        drawn = inside & (rank < k)
        sent = x
        if SCALED:
            sent = x * factor
        if ADD:
            sent = tl.where(idle, 0.0, sent)
        tl.store(own + rank.to(tl.int32), sent, mask=drawn)
        zeros = tl.zeros([ROW], tl.float32)
        if ADD:
            left = zeros
            if SCALED:
                left = x - sent
            left = tl.where(drawn, tl.where(idle, x, left), x)
            tl.store(buffer + here, tl.where(is_finite(left), left, 0.0), mask=inside)
        tl.store(grad + here, zeros, mask=inside)
        at += ROW


@kernel()
def put_drawn(
    values, apart, workers, share, out,
    flags, flags_apart, senders, table,
    step,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the mean of BLOCK values, all workers' in their order, among zeros."""
    row = table + 8 * tl.program_id(0)
    begin, start = tl.load(row), tl.load(row + 4)
    numel, shift, k = unsigned(row + 1), unsigned(row + 2), unsigned(row + 3)
    own = values + tl.load(row + 5)
    low = unsigned(row + 6)
    high = unsigned(row + 7) + step.to(tl.uint32) * 0x85EBCA6B
    bad = arrived(flags, flags_apart, senders)
    rank = start + tl.arange(0, BLOCK)
    inside = rank.to(tl.uint32) < k
    place = place_of(rank.to(tl.uint32), numel, shift, low, high).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    sender = 0
    while sender < workers:
        value = tl.load(own + sender * apart.to(tl.int64) + rank, mask=inside, other=0.0)
        total += value * share
        sender += 1
    tl.store(out + begin + place, tl.where(place == 0, total + bad, total), mask=inside)
    left_out = rank_of(tl.zeros_like(numel), numel, shift, low, high) >= k
    tl.store(out + begin, bad, mask=left_out & (start == 0))


def tables_of(
    parts: Sequence[tuple[int, int, int, int, int]], scaled: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return tables for ``encode`` and ``average``, int32 on ``device``.

    Args:
        parts: of each parameter, its index among the bucket's that are not empty, its first
            element, its end, how many elements are drawn, and the key.
        scaled: whether sent elements are multiplied by numel/k.
        device: of the bucket.
    """
    pieces, blocks, before = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
    for place, begin, end, k, key in parts:
        numel = end - begin
        kind = numel, shift_of(numel), k
        words = tuple(np.array([key & 0xFFFFFFFF, key >> 32], np.uint32).view(np.int32).tolist())
        factor = int(np.array(numel / k if scaled else 1.0, np.float32).view(np.int32))
        for start in range(begin, end, PIECE):
            row = place, start, min(start + PIECE, end), begin, *kind, before, *words, factor
            pieces.append(row)
        blocks += [(begin, *kind, start, before, *words) for start in range(0, k, ROW)]
        before += k
    one, other = (torch.tensor(r, dtype=torch.int32, device=device) for r in (pieces, blocks))
    return one, other


def encode(
    buffer: Tensor, table: Tensor, step: int, sent: int, scaled: bool, pending: Pending
) -> Packed:
    """Return the payload (values,), as ``core.segments.Pending`` says.

    Args:
        buffer: of the whole bucket, changed in place.
        table: the first one of ``tables_of``.
        step: number of the step.
        sent: values of all parameters.
        scaled: as for ``tables_of``.
        pending: the engine's work. The gradient of these parameters becomes 0, so that ``average``
            writes only what has been sent.
    """
    packed = pending.reserve([(torch.float32, sent)])
    launch(
        take_drawn,
        (len(table),),
        *(*given(buffer, pending), table, step),
        *(packed[0], *pending.ending(packed)),
        ADD=pending.grad is not None,
        SCALED=scaled,
        ROW=ROW,
    )
    return packed.first(1)


def average(
    payloads: Sequence[Tensor], out: Tensor, table: Tensor, step: int, pending: Pending
) -> None:
    """Write the mean of the payloads to ``out``, which ``encode`` has zeroed.

    Args:
        payloads: values of all workers, or their mean only.
        out: the gradient's tensor.
        table: the second one of ``tables_of``.
        step: number of the step.
        pending: has the flags.
    """
    values, apart = evenly(payloads)
    launch(
        put_drawn,
        (len(table),),
        *(values, apart, len(payloads), 1 / len(payloads), out),
        *(*flags_of(pending, out), table, step),
        BLOCK=ROW,
    )


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of all kernels for ``numbers``, ``(1000,)``, beside torch's."""
    x, keys, step = 0.5 * numbers + numbers.flip(0), (3, 1 << 61), 5
    parts = [(i, 500 * i, 500 * i + 500, 70, key) for i, key in enumerate(keys)]
    drawn = [first(500, 70, key, numbers.device, step=step) for key in keys]
    for scaled in (False, True):
        pieces, blocks = tables_of(parts, scaled, numbers.device)
        pending, left = sample(numbers), numbers.clone()
        (values,) = encode(left, pieces, step, 140, scaled, pending)
        sent = x[drawn[0]] * (500 / 70 if scaled else 1)
        yield values, torch.cat([sent, torch.zeros_like(sent)])
        yield left, x.index_add(0, drawn[0], sent, alpha=-1)
        assert pending.grad is not None
        yield pending.grad, torch.zeros_like(numbers)
        average([values, values], pending.grad, blocks, step, pending)
        yield pending.grad, torch.zeros_like(numbers).index_add(0, drawn[0], sent)


ATTEMPTS = {"random_k": _attempt}
