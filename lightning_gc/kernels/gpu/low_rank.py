"""Triton kernels that factor all matrices of a bucket; see ``kernels.low_rank``.

A matrix is cut into tiles, one for each program. Where several tiles share a sum, each writes its
own, and the last one to end adds them up in the tiles' order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core.flow import Payload
from lightning_gc.core.message import reserve
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu.launch import end_message, is_finite, kernel, launch, magnitude_bits
from lightning_gc.kernels.gpu.segments import arrived, compensated, flags_of, given, sample
from lightning_gc.kernels.low_rank import (
    COLUMNS,
    LARGEST,
    LEAST,
    ROWS,
    Factors,
    Side,
    Tiles,
)

PLACES, FIELDS = tl.constexpr(8), tl.constexpr(9)
"""Numbers in a row of ``Factors.places`` and of ``Tiles.rows``."""


@triton.jit
def scaled(columns, at, size, rank, j, longest, unit, here):
    """Return elements of column j over ``longest``, or of a unit vector if it is not negative."""
    x = tl.load(columns + at + here * rank + j, mask=here < size, other=0.0)
    x = tl.div_rn(x, tl.zeros_like(x) + longest)
    return tl.where(unit < 0, x, tl.where(here == unit, 1.0, 0.0))


@triton.jit
def earlier(bases, at, size, here, ranks, count):
    """Return elements of the first ``count`` rows of a basis, and zeros of the others."""
    inside = (here[:, None] < size) & (ranks[None, :] < count)
    return tl.load(bases + at + ranks[None, :] * size + here[:, None], mask=inside, other=0.0)


@triton.jit
def highest_of(columns, at, size, rank, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of the largest magnitude of each column."""
    ranks = tl.arange(0, RANK)
    most = tl.zeros([BLOCK, RANK], tl.int32)
    first = 0
    while first < size:
        here = first + tl.arange(0, BLOCK)
        inside = (here[:, None] < size) & (ranks[None, :] < rank)
        x = tl.load(columns + at + here[:, None] * rank + ranks[None, :], mask=inside, other=0.0)
        most = tl.maximum(most, magnitude_bits(x))
        first += BLOCK
    return tl.max(most, axis=0)


@triton.jit
def shares_of(
    columns, bases, at, size, rank,
    j, longest, unit, known,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return products of column j, without its ``known`` shares, with earlier ones and itself."""
    shares = tl.zeros([BLOCK, RANK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    first = 0
    while first < size:
        here = first + tl.arange(0, BLOCK)
        basis = earlier(bases, at, size, here, tl.arange(0, RANK), j)
        x = scaled(columns, at, size, rank, j, longest, unit, here)
        x -= tl.sum(basis * known[None, :], axis=1)
        shares += basis * x[:, None]
        squares += x * x
        first += BLOCK
    return tl.sum(shares, axis=0), tl.sum(squares, axis=0)


@triton.jit
def least_spanned(bases, at, size, j, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the unit vector with the least part in the span of earlier columns."""
    lowest = tl.zeros([BLOCK], tl.float32) + 2.0
    which = tl.zeros([BLOCK], tl.int32)
    first = 0
    while first < size:
        here = first + tl.arange(0, BLOCK)
        basis = earlier(bases, at, size, here, tl.arange(0, RANK), j)
        spanned = tl.sum(basis * basis, axis=1)
        lower = (here < size) & (spanned < lowest)
        which = tl.where(lower, here, which)
        lowest = tl.where(lower, spanned, lowest)
        first += BLOCK
    least = tl.min(lowest, axis=0)
    return tl.min(tl.where(lowest == least, which, 0x7FFFFFFF), axis=0)


@kernel()
def orthonormalise(columns, bases, table, side, least, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the basis of a matrix's columns: each loses, twice, its part in earlier ones."""
    row = table + PLACES * tl.program_id(0)
    rank, size, at = tl.load(row + 3), tl.load(row + 1 + side), tl.load(row + 4 + side)
    ranks = tl.arange(0, RANK)
    highest = highest_of(columns, at, size, rank, RANK, BLOCK)
    bad = tl.max(highest, axis=0) >= 0x7F800000
    none = tl.zeros([RANK], tl.float32)
    j = 0
    while j < rank:
        peak = tl.sum(tl.where(ranks == j, highest, 0), axis=0)
        longest = tl.where(peak > 0, peak.to(tl.float32, bitcast=True), 1.0)
        unit = -1
        ended = 0
        while ended == 0:
            once, before = shares_of(
                columns, bases, at, size, rank, j, longest, unit, none, RANK, BLOCK
            )  # fmt: skip
            twice, rest = none, before
            if j > 0:
                twice, rest = shares_of(
                    columns, bases, at, size, rank, j, longest, unit, once, RANK, BLOCK
                )  # fmt: skip
            length = rest - tl.sum(twice * twice, axis=0)
            if (length > least * before) & (length > 0.5 * rest) | (unit >= 0):
                root = tl.sqrt_rn(length)
                first = 0
                while first < size:
                    here = first + tl.arange(0, BLOCK)
                    basis = earlier(bases, at, size, here, ranks, j)
                    x = scaled(columns, at, size, rank, j, longest, unit, here)
                    x -= tl.sum(basis * once[None, :], axis=1)
                    x -= tl.sum(basis * twice[None, :], axis=1)
                    x = tl.where(bad, float("nan"), tl.div_rn(x, tl.zeros_like(x) + root))
                    tl.store(bases + at + j * size + here, x, mask=here < size)
                    first += BLOCK
                ended = 1
            else:  # the column has no direction of its own: only rounding is left of it
                unit = least_spanned(bases, at, size, j, RANK, BLOCK)
        tl.debug_barrier()  # other threads of this program read the column next
        j += 1


def orthonormal(columns: Tensor, factors: Factors, side: Side) -> Tensor:
    """Return orthonormal bases; see ``kernels.low_rank``."""
    bases, rank = torch.empty_like(columns), triton.next_power_of_2(factors.rank)
    launch(
        orthonormalise,
        (len(factors.places),),
        *(columns, bases, factors.table(columns.device), int(side), LEAST),
        RANK=rank,
        BLOCK=2048 // rank,
    )
    return bases


@triton.jit
def ended_last(arrivals, counter, tiles):
    """Return whether this program is the last of ``tiles`` to have written its sums."""
    tl.debug_barrier()
    return tl.atomic_add(arrivals + counter, 1) == tiles - 1


@triton.jit
def add_up(sums, several, into, size, BLOCK: tl.constexpr):
    """Write the sum of several tiles' sums, ``size`` numbers each, one after the other."""
    first = 0
    while first < size:
        here = first + tl.arange(0, BLOCK)
        whole = tl.zeros([BLOCK], tl.float32)
        other = 0
        while other < several:
            at = sums + other * size + here
            whole += tl.load(at, mask=here < size, other=0.0, cache_modifier=".cg")
            other += 1
        tl.store(into + here, whole, mask=here < size)
        first += BLOCK


@kernel()
def project_rows(
    buffer, grad, decay, gain, peaks,
    table, tiles,
    bases, products, sums, arrivals,
    flag, sent_flag, padding, length,
    PENDING: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write M·Q for a tile; with a gradient to add, first write the sum M to the buffer."""
    tile = tiles + FIELDS * tl.program_id(0)
    if PENDING:
        first_program = tl.program_id(0) == 0
        if first_program:
            end_message(flag, sent_flag, padding, length)
    place = table + PLACES * tl.load(tile)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    left, right = tl.load(tile + 3), tl.load(tile + 4)
    several, own = tl.load(tile + 6), tl.load(tile + 8)
    start, m, rank = tl.load(place), tl.load(place + 2), tl.load(place + 3)
    into, basis_at = tl.load(place + 4), tl.load(place + 5)
    ranks = tl.arange(0, RANK)
    if ADD:
        idle = tl.load(peaks + tl.load(place + 6)) == 0.0
    row = begin
    while row < end:
        rows = row + tl.arange(0, ROWS)
        total = tl.zeros([ROWS, COLUMNS, RANK], tl.float32)
        column = left
        while column < right:
            columns = column + tl.arange(0, COLUMNS)
            inside = (rows[:, None] < end) & (columns[None, :] < right)
            at = start + rows[:, None] * m + columns[None, :]
            x = compensated(buffer, grad, at, inside, decay, gain, ADD)
            if ADD:
                tl.store(buffer + at, x, mask=inside)
                x = tl.where(idle, 0.0, x)
            q_at = bases + basis_at + ranks[None, :] * m + columns[:, None]
            known = (columns[:, None] < right) & (ranks[None, :] < rank)
            q = tl.load(q_at, mask=known, other=0.0)
            total += x[:, :, None] * q[None, :, :]
            column += COLUMNS
        whole = tl.sum(total, axis=1)
        wanted = (rows[:, None] < end) & (ranks[None, :] < rank)
        if several > 1:
            tl.store(
                sums + own + (rows[:, None] - begin) * rank + ranks[None, :], whole, mask=wanted
            )
        else:
            tl.store(products + into + rows[:, None] * rank + ranks[None, :], whole, mask=wanted)
        row += ROWS
    if several > 1:
        counter = tl.load(tile + 7)
        if ended_last(arrivals, counter, several):
            first = sums + own - tl.load(tile + 5) * (end - begin) * rank
            target = products + into + begin * rank
            add_up(first, several, target, (end - begin) * rank, BLOCK=ROWS * COLUMNS)


@kernel()
def project_columns(
    buffer, peaks,
    table, tiles,
    bases, products, sums, arrivals,
    ADD: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write Pᵀ·M for a tile of COLUMNS columns."""
    tile = tiles + FIELDS * tl.program_id(0)
    place = table + PLACES * tl.load(tile)
    row, end, left = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    several, own = tl.load(tile + 6), tl.load(tile + 8)
    start, n = tl.load(place), tl.load(place + 1)
    m, rank = tl.load(place + 2), tl.load(place + 3)
    basis_at, into = tl.load(place + 4), tl.load(place + 5)
    ranks = tl.arange(0, RANK)
    columns = left + tl.arange(0, COLUMNS)
    if ADD:
        idle = tl.load(peaks + tl.load(place + 6)) == 0.0
    total = tl.zeros([ROWS, COLUMNS, RANK], tl.float32)
    while row < end:
        rows = row + tl.arange(0, ROWS)
        inside = (rows[:, None] < end) & (columns[None, :] < m)
        x = tl.load(buffer + start + rows[:, None] * m + columns[None, :], mask=inside, other=0.0)
        if ADD:
            x = tl.where(idle, 0.0, x)
        known = (rows[:, None] < end) & (ranks[None, :] < rank)
        p = tl.load(bases + basis_at + ranks[None, :] * n + rows[:, None], mask=known, other=0.0)
        total += x[:, :, None] * p[:, None, :]
        row += ROWS
    whole = tl.sum(total, axis=0)
    wanted = (columns[:, None] < m) & (ranks[None, :] < rank)
    here = ranks[None, :] * COLUMNS + (columns[:, None] - left)
    if several > 1:
        tl.store(sums + own + here, whole, mask=wanted)
        if ended_last(arrivals, tl.load(tile + 7), several):
            first = own - tl.load(tile + 5) * rank * COLUMNS
            whole = tl.zeros([COLUMNS, RANK], tl.float32)
            other = 0
            while other < several:
                at = sums + first + other * rank * COLUMNS + here
                whole += tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg")
                other += 1
            tl.store(products + into + ranks[None, :] * m + columns[:, None], whole, mask=wanted)
    else:
        tl.store(products + into + ranks[None, :] * m + columns[:, None], whole, mask=wanted)


@triton.jit
def bounded(x, most):
    """Return x within ``most``; NaN stays."""
    return tl.where(x > most, most, tl.where(x < -most, -most, x))


@triton.jit
def keep_columns(q, before, kept, place, BLOCK: tl.constexpr):
    """Keep Q of a matrix, (r, m), as columns; or ``before`` if it is zero or not finite."""
    m, rank, q_at = tl.load(place + 2), tl.load(place + 3), tl.load(place + 5)
    wrong = tl.zeros([BLOCK], tl.int32)
    some = tl.zeros([BLOCK], tl.int32)
    first = 0
    while first < m * rank:
        here = first + tl.arange(0, BLOCK)
        x = tl.load(q + q_at + here, mask=here < m * rank, other=0.0)
        wrong |= tl.where(is_finite(x), 0, 1)
        some |= tl.where(x == 0.0, 0, 1)
        first += BLOCK
    # How many numbers are from ``q``: all or none.
    ours = tl.where(tl.max(some, axis=0) > tl.max(wrong, axis=0), m * rank, 0)
    first = 0
    while first < m * rank:
        here = first + tl.arange(0, BLOCK)
        at = q_at + here % rank * m + here // rank
        inside = here < m * rank
        new = tl.load(q + at, mask=here < ours, other=0.0)
        old = tl.load(before + at, mask=inside & (here >= ours), other=0.0)
        tl.store(kept + q_at + here, tl.where(here < ours, new, old), mask=inside)
        first += BLOCK


@kernel()
def apply_factors(
    buffer, out,
    p, q, before, kept,
    peaks,
    flags, stride, senders, table, tiles,
    tile_count, most,
    ADD: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write P·Qᵀ of a tile to ``out`` and keep the rest; the last programs keep each matrix's Q."""
    program = tl.program_id(0)
    if program < tile_count:
        tile = tiles + FIELDS * program
        place = table + PLACES * tl.load(tile)
        row, end = tl.load(tile + 1), tl.load(tile + 2)
        left, right = tl.load(tile + 3), tl.load(tile + 4)
        start, n = tl.load(place), tl.load(place + 1)
        m, rank = tl.load(place + 2), tl.load(place + 3)
        p_at, q_at = tl.load(place + 4), tl.load(place + 5)
        if ADD:
            idle = tl.load(peaks + tl.load(place + 6)) == 0.0
        bad = arrived(flags, stride, senders)
        while row < end:
            rows = row + tl.arange(0, ROWS)
            column = left
            while column < right:
                columns = column + tl.arange(0, COLUMNS)
                inside = (rows[:, None] < end) & (columns[None, :] < right)
                at = start + rows[:, None] * m + columns[None, :]
                product = tl.zeros([ROWS, COLUMNS], tl.float32)
                c = 0
                while c < rank:
                    u = tl.load(p + p_at + c * n + rows, mask=rows < end, other=0.0)
                    v = tl.load(q + q_at + c * m + columns, mask=columns < right, other=0.0)
                    product += u[:, None] * v[None, :]
                    c += 1
                if KEEP:
                    x = tl.load(buffer + at, mask=inside, other=0.0)
                    known = tl.where(is_finite(product), product, 0.0)
                    rest = bounded(x - known, most)
                    if ADD:
                        left_alone = tl.where(is_finite(x), x, 0.0)
                        rest = tl.where(idle, bounded(0.0 - known, most) + left_alone, rest)
                    tl.store(buffer + at, tl.where(is_finite(rest), rest, 0.0), mask=inside)
                tl.store(out + at, tl.where(at == start, product + bad, product), mask=inside)
                column += COLUMNS
            row += ROWS
    else:
        keep_columns(q, before, kept, table + PLACES * (program - tile_count), BLOCK)


def project(buffer: Tensor, bases: Tensor, factors: Factors, pending: Pending | None) -> Payload:
    """Return the payload ``(M·Q,)``; see ``kernels.low_rank``."""
    tiles, fields = factors.by_rows, [(torch.float32, factors.left)]
    packed = reserve(fields, buffer.device) if pending is None else pending.reserve(fields)
    launch(
        project_rows,
        (tiles.count,),
        *(*given(buffer, pending), factors.table(buffer.device), tiles.table(buffer.device)),
        *(bases, packed[0], *_partial(buffer, tiles, pending)),
        *((bases, bases, bases, 0) if pending is None else pending.ending(packed)),
        PENDING=pending is not None,
        ADD=pending is not None and pending.grad is not None,
        RANK=triton.next_power_of_2(factors.rank),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return packed.first(1)


def project_back(
    buffer: Tensor, bases: Tensor, factors: Factors, pending: Pending | None
) -> Tensor:
    """Return Pᵀ·M of each matrix; see ``kernels.low_rank``."""
    tiles, found = factors.by_columns, buffer.new_empty(factors.right)
    launch(
        project_columns,
        (tiles.count,),
        *(buffer, given(buffer, pending)[-1]),
        *(factors.table(buffer.device), tiles.table(buffer.device)),
        *(bases, found, *_partial(buffer, tiles, pending)),
        ADD=pending is not None and pending.grad is not None,
        RANK=triton.next_power_of_2(factors.rank),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return found


def apply(
    buffer: Tensor,
    out: Tensor,
    p: Tensor,
    q: Tensor,
    before: Tensor,
    factors: Factors,
    pending: Pending | None,
) -> Tensor:
    """Write P·Qᵀ to ``out`` and keep the rest; see ``kernels.low_rank``."""
    kept, tiles = torch.empty_like(q), factors.by_rows
    launch(
        apply_factors,
        (tiles.count + len(factors.places),),
        *(buffer, out, p, q, before, kept, given(buffer, pending)[-1], *flags_of(pending, out)),
        *(factors.table(buffer.device), tiles.table(buffer.device), tiles.count, LARGEST),
        ADD=pending is not None and pending.grad is not None,
        KEEP=out.data_ptr() != buffer.data_ptr(),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        BLOCK=1024,
    )
    return kept


def _partial(buffer: Tensor, tiles: Tiles, pending: Pending | None) -> tuple[Tensor, Tensor]:
    """Return memory for sums of tiles, and zeroed counters of tiles that have ended."""
    if pending is not None:
        return buffer.new_empty(tiles.sums), pending.work.take(tiles.counters)
    counters = torch.zeros if tiles.counters else torch.empty
    return (
        buffer.new_empty(tiles.sums),
        counters(tiles.counters, dtype=torch.int32, device=buffer.device),
    )


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of all kernels for ``numbers``, ``(1000,)``, beside torch's.

    Torch's are float64: the user may have chosen TensorFloat-32 for float32's matrix products.
    """
    factors = Factors([0, 500], [(20, 25), (4, 125)], 2, [0, 1], wide=32, tall=16)
    pending, left, out = sample(numbers), numbers.clone(), torch.empty_like(numbers)
    x = 0.5 * numbers + numbers.flip(0)
    draw = torch.linspace(0, 50, factors.right, dtype=torch.float32, device=numbers.device).sin()
    q = orthonormal(draw, factors, Side.RIGHT)
    m, first, second = (
        each.view(rows, -1).double() for each, rows in ((x[:500], 20), (q[:50], 2), (q[50:], 2))
    )
    for basis in (first, second):
        yield (basis @ basis.t()).float(), torch.eye(2, dtype=torch.float32, device=numbers.device)
    (sent,) = project(left, q, factors, pending)
    yield left, x
    yield sent, torch.cat([(m @ first.t()).float().view(-1), torch.zeros_like(sent[40:])])
    p = orthonormal(sent, factors, Side.LEFT)
    mine = p[:40].view(2, 20).double()
    back = project_back(left, p, factors, pending)
    yield back, torch.cat([(mine @ m).float().view(-1), torch.zeros_like(back[50:])])
    kept = apply(left, out, p, back, q, factors, pending)
    yield (
        kept,
        torch.cat([back[:50].view(2, 25).t().reshape(-1), q[50:].view(2, -1).t().reshape(-1)]),
    )
    known = (mine.t() @ back[:50].view(2, 25).double()).float().view(-1)
    product = torch.cat([known, torch.zeros_like(x[500:])])
    yield out, product
    yield left, x - product


ATTEMPTS = {"low_rank": _attempt}
