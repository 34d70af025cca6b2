"""Triton kernels over pieces of all parameters of a bucket; see ``kernels.segments``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.message import evenly
from lightning_gc.core.segments import Pending, Segments, Workspace
from lightning_gc.kernels.gpu.launch import is_finite, kernel, launch, magnitude_bits

ROW = 1024
"""Elements of a piece that a program reads at a time."""
CLEAN_BLOCK = 2048
"""Elements that one program of ``clean`` reads."""


@triton.jit
def piece_of(pieces, piece):
    """Return the parameter of a piece, its first element and end, and its place elsewhere."""
    row = pieces + 4 * piece
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@kernel()
def largest(buffer, pieces, found, BLOCK: tl.constexpr):
    """Raise ``found`` of each piece's parameter to the bits of its largest magnitude."""
    part, at, stop, _ = piece_of(pieces, tl.program_id(0))
    most = tl.zeros([BLOCK], tl.int32)
    while at < stop:
        here = at + tl.arange(0, BLOCK)
        x = tl.load(buffer + here, mask=here < stop, other=0.0)
        most = tl.maximum(most, magnitude_bits(x))
        at += BLOCK
    tl.atomic_max(found + part, tl.max(most, axis=0))


def peaks(flat: Tensor, segments: Segments, work: Workspace) -> Tensor:
    """Return the largest magnitudes, ``(n,)`` float32; see ``kernels.segments``."""
    pieces, found = segments.pieces, work.take(len(segments.spans))
    launch(largest, (len(pieces),), flat, pieces, found, BLOCK=ROW)
    return found.view(torch.float32)


@kernel()
def move_pieces(
    target, source, peaks, pieces, ADD: tl.constexpr, TAKE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy, take or add a piece of ``source`` if its parameter's peak is zero."""
    part, at, stop, _ = piece_of(pieces, tl.program_id(0))
    if tl.load(peaks + part) == 0.0:
        while at < stop:
            here = at + tl.arange(0, BLOCK)
            x = tl.load(source + here, mask=here < stop, other=0.0)
            if ADD:
                kept = tl.load(target + here, mask=here < stop, other=0.0)
                x = kept + tl.where(is_finite(x), x, 0.0)
            tl.store(target + here, x, mask=here < stop)
            if TAKE:
                tl.store(source + here, tl.zeros([BLOCK], tl.float32), mask=here < stop)
            at += BLOCK


def move_idle(how: str, target: Tensor, source: Tensor, peaks: Tensor, pieces: Tensor) -> None:
    """Move elements of idle parameters; see ``kernels.segments``."""
    launch(
        move_pieces,
        (len(pieces),),
        *(target, source, peaks, pieces),
        ADD=how == "add",
        TAKE=how == "take",
        BLOCK=ROW,
    )


@kernel()
def zero_if(buffer, peaks, flag, pieces, parameters, PEAKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the flag, and zero a piece if a peak is not finite."""
    piece = tl.program_id(0)
    most = tl.zeros([PEAKS], tl.int32)
    first = 0
    while first < parameters:
        at = first + tl.arange(0, PEAKS)
        found = tl.load(peaks + at, mask=at < parameters, other=0.0)
        most = tl.maximum(most, magnitude_bits(found))
        first += PEAKS
    bad = tl.max(most, axis=0) >= 0x7F800000
    if piece == 0:
        tl.store(flag, tl.where(bad, float("nan"), 0.0))
    if bad:
        _, at, stop, _ = piece_of(pieces, piece)
        while at < stop:
            here = at + tl.arange(0, BLOCK)
            tl.store(buffer + here, tl.zeros([BLOCK], tl.float32), mask=here < stop)
            at += BLOCK


def silence(flat: Tensor, found: Tensor, segments: Segments) -> Tensor:
    """Zero ``flat`` if a peak is not finite, and return the flag; see ``kernels.segments``."""
    flag, pieces = flat.new_empty(1), segments.pieces
    read = flat, found, flag, pieces, found.numel()
    launch(zero_if, (len(pieces),), *read, PEAKS=256, BLOCK=ROW)
    return flag


@kernel("buffer", "numel")
def zero_non_finite(buffer, numel, BLOCK: tl.constexpr):
    """Zero the elements among BLOCK that are not finite; others are only read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(buffer + at, mask=at < numel, other=0.0)
    bad = (at < numel) & (is_finite(x) == 0)
    tl.store(buffer + at, tl.zeros([BLOCK], tl.float32), mask=bad)


def clean(flat: Tensor) -> None:
    """Set elements that are not finite to zero; see ``kernels.segments``."""
    numel = flat.numel()
    launch(zero_non_finite, (triton.cdiv(numel, CLEAN_BLOCK),), flat, numel, BLOCK=CLEAN_BLOCK)


@triton.jit
def compensated(buffer, grad, at, inside, decay, gain, ADD: tl.constexpr):
    """Return ``decay·e + gain·g``; or the buffer's elements where there is no gradient to add."""
    x = tl.load(buffer + at, mask=inside, other=0.0)
    if ADD:
        g = tl.load(grad + at, mask=inside, other=0.0)
        x = tl.fma(g, tl.zeros_like(g) + gain, x * decay)  # one rounding, as in torch's add
    return x


@triton.jit
def left_of(x, value, whole, idle, mine, ADD: tl.constexpr):
    """Return what stays where ``value`` is sent for ``x``: law 1 of codecs.

    With ADD all of an idle parameter stays, and numbers that are not finite become 0. In the shard
    that is ``mine`` they stay for ``book``.
    """
    left = x - value
    if ADD:
        left = tl.where(idle, whole, left)
        left = tl.where(is_finite(left) | (mine & (idle == 0)), left, 0.0)
    return left


@triton.jit
def arrived(flags, stride, count):
    """Return the sum of the flags times zero: 0, or NaN if one is not finite."""
    total = 0.0
    sender = 0
    while sender < count:
        total += tl.load(flags + sender * stride.to(tl.int64)) * 0.0
        sender += 1
    return total


@kernel()
def take_pieces(
    buffer, grad, decay, gain, peaks,
    table, taken,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a piece out of ``buffer``; of an idle parameter zeros are taken and the rest stays."""
    part, at, stop, place = piece_of(table, tl.program_id(0))
    idle = tl.load(peaks + part) == 0.0
    place -= at
    while at < stop:
        here = at + tl.arange(0, BLOCK)
        inside = here < stop
        x = compensated(buffer, grad, here, inside, decay, gain, ADD)
        left = tl.zeros([BLOCK], tl.float32)
        if ADD:
            left = tl.where(idle, tl.where(is_finite(x), x, 0.0), 0.0)
            x = tl.where(idle, 0.0, x)
        tl.store(taken + place + here, x, mask=inside)
        tl.store(buffer + here, left, mask=inside)
        at += BLOCK


def take(buffer: Tensor, table: Tensor, taken: Tensor, pending: Pending) -> None:
    """Move the parameters of ``table`` to ``taken``; see ``kernels.segments``."""
    launch(
        take_pieces,
        (len(table),),
        *(*given(buffer, pending), table, taken),
        ADD=pending.grad is not None,
        BLOCK=ROW,
    )


@kernel()
def put_pieces(
    taken, apart, workers, share, out,
    flags, stride, senders, starts, table,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a piece of the mean, and add the flags to the first element of its parameter."""
    part, at, stop, place = piece_of(table, tl.program_id(0))
    begin = tl.load(starts + part)
    place -= at
    bad = arrived(flags, stride, senders)
    while at < stop:
        here = at + tl.arange(0, BLOCK)
        total = tl.load(taken + place + here, mask=here < stop, other=0.0) * share
        sender = 1
        while sender < workers:
            there = taken + sender * apart.to(tl.int64) + place + here
            x = tl.load(there, mask=here < stop, other=0.0)
            total += x * share
            sender += 1
        tl.store(out + here, tl.where(here == begin, total + bad, total), mask=here < stop)
        at += BLOCK


def put(taken: Sequence[Tensor], out: Tensor, table: Tensor, pending: Pending) -> None:
    """Write the mean of ``taken`` to the parameters of ``table``; see ``kernels.segments``."""
    own, apart = evenly(taken)
    launch(
        put_pieces,
        (len(table),),
        *(own, apart, len(taken), 1 / len(taken), out),
        *(*flags_of(pending, out), pending.segments.starts, table),
        BLOCK=ROW,
    )


@kernel()
def book_pieces(buffer, mean, times, peaks, table, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``times`` what is left of a piece of the mean.

    The error of an idle parameter is added when the sum has been rounded.
    """
    part, at, stop, place = piece_of(table, tl.program_id(0))
    place -= at
    idle = part < 0
    if ADD:
        idle = tl.load(peaks + part) == 0.0
    weight = tl.zeros([BLOCK], tl.float32) + times
    while at < stop:
        here = at + tl.arange(0, BLOCK)
        left = tl.load(mean + place + here, mask=here < stop, other=0.0)
        left = tl.where(is_finite(left), left, 0.0)
        kept = tl.load(buffer + here, mask=here < stop, other=0.0)
        total = tl.fma(left, weight, kept)
        lone = left * weight
        total = tl.where(idle, kept + tl.where(is_finite(lone), lone, 0.0), total)
        tl.store(buffer + here, tl.where(is_finite(total), total, 0.0), mask=here < stop)
        at += BLOCK


def book(buffer: Tensor, mean: Tensor, times: int, table: Tensor, pending: Pending | None) -> None:
    """Add ``times`` what is left of a mean; see ``kernels.segments``."""
    peaks = buffer if pending is None else pending.peaks
    launch(
        book_pieces,
        (len(table),),
        *(buffer, mean, float(times), peaks, table),
        ADD=pending is not None,
        BLOCK=ROW,
    )


def given(buffer: Tensor, pending: Pending | None) -> tuple[Tensor, Tensor, float, float, Tensor]:
    """Return the buffer, the gradient to add and both weights, and peaks, as kernels take them."""
    if pending is None:
        return buffer, buffer, 1.0, 1.0, buffer
    grad = buffer if pending.grad is None else pending.grad
    return buffer, grad, pending.decay, pending.gain, pending.peaks


def flags_of(pending: Pending | None, like: Tensor) -> tuple[Tensor, int, int]:
    """Return the first of the flags that have arrived, their distance, and how many there are."""
    flags = [] if pending is None else pending.flags
    return *evenly(flags or [like]), len(flags)


def sample(numbers: Tensor) -> Pending:
    """Return work for tests of kernels, for a bucket of ``(1000,)``: an idle parameter of two."""
    segments = Segments([(0, 500), (500, 1000)], numbers.device)
    peak = torch.tensor([1.0, 0.0], dtype=torch.float32, device=numbers.device)
    flag = torch.zeros(1, dtype=torch.float32, device=numbers.device)
    work = Workspace(segments)
    return Pending(segments, peak, flag, work, numbers.flip(0), decay=0.5, flags=[flag, flag])


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    segments = Segments([(0, 500), (500, 1000)], numbers.device)
    flat, other = numbers.clone(), numbers.flip(0)
    flat[500:] = 0
    found = peaks(flat, segments, Workspace(segments))
    yield found, flat.abs().view(2, 500).amax(1)
    pieces = segments.pieces
    taken, source = numbers.clone(), other.clone()
    move_idle("take", taken, source, found, pieces)
    yield taken, torch.cat([numbers[:500], other[500:]])
    yield source, torch.cat([other[:500], torch.zeros_like(other[500:])])
    move_idle("add", taken, other, found, pieces)
    yield taken, torch.cat([numbers[:500], 2 * other[500:]])
    for peak, wanted in ((1.0, 2 * numbers), (float("inf"), 0 * numbers)):
        given = 2 * numbers
        flag = silence(given, numbers.new_full((2,), peak), segments)
        yield given, wanted
        yield flag.isnan(), torch.isinf(numbers.new_full((1,), peak))
    bad = numbers.masked_fill(numbers > 0.5, float("inf")).masked_fill_(
        numbers < -0.5, float("nan")
    )
    clean(bad)
    yield bad, numbers.masked_fill(numbers.abs() > 0.5, 0)
    pending = sample(numbers)
    rows = [[0, 0, 500, 0], [1, 500, 1000, 500]]
    places = torch.tensor(rows, dtype=torch.int32, device=numbers.device)
    left, out = numbers.clone(), numbers.clone()
    taken, x = torch.empty_like(out), 0.5 * numbers + numbers.flip(0)
    take(left, places, taken, pending)
    yield taken, torch.cat([x[:500], torch.zeros_like(x[500:])])
    yield left, torch.cat([torch.zeros_like(x[:500]), x[500:]])
    put([taken, numbers], out, places, pending)
    yield out, 0.5 * taken + 0.5 * numbers


ATTEMPTS = {"segments": _attempt}
