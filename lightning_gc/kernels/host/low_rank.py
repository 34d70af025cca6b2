"""Kernels for the host that factor all matrices of a bucket, compiled by numba.

Factors that all workers compute, bases and their product, are sums in an order written out here, so
they have the same bits on all processors. Sums over a worker's own matrix are in any order.
"""

from collections.abc import Iterator

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.segments import Pending
from lightning_gc.kernels.host.segments import jit
from lightning_gc.kernels.low_rank import LARGEST, LEAST, Factors, Side

_any_order = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})


def orthonormal(columns: Tensor, factors: Factors, side: Side) -> Tensor:
    """Return orthonormal bases; see ``kernels.low_rank``."""
    bases = torch.empty_like(columns)
    _orthonormal(columns.numpy(), bases.numpy(), factors.places, int(side))
    return bases


@jit
def _orthonormal(columns, bases, places, side):
    for matrix in range(len(places)):
        rank, size, at = places[matrix, 3], places[matrix, 1 + side], places[matrix, 4 + side]
        basis = bases[at : at + size * rank].reshape(rank, size)
        if not _scaled(columns[at : at + size * rank].reshape(size, rank), basis):
            basis[:] = np.float32(np.nan)
            continue
        for j in range(rank):
            before = _squares(basis[j])
            after = _remove(basis, j)
            if not (before > 0 and after > np.float32(LEAST) * before):
                basis[j] = np.float32(0)
                basis[j, _least_spanned(basis, j)] = np.float32(1)
                after = _remove(basis, j)
            length = np.sqrt(after)
            for i in range(basis.shape[1]):
                basis[j, i] /= length


@jit
def _scaled(columns, basis):
    """Write columns, ``(n, r)``, as rows whose largest magnitude is 1; False if not finite."""
    size, rank = columns.shape
    for j in range(rank):
        longest = np.float32(0)
        for i in range(size):
            magnitude = abs(columns[i, j])
            if not magnitude < np.inf:
                return False
            longest = max(longest, magnitude)
        if longest == 0:
            longest = np.float32(1)
        for i in range(size):
            basis[j, i] = columns[i, j] / longest
    return True


@jit
def _remove(basis, j):
    """Subtract from row j its part in the span of earlier rows, twice; return its square."""
    for _ in range(2):
        for c in range(j):
            share = _product(basis[c], basis[j])
            for i in range(basis.shape[1]):
                basis[j, i] -= share * basis[c, i]
    return _squares(basis[j])


@jit
def _least_spanned(basis, j):
    """Return the unit vector with the least part in the span of the first j rows."""
    best, least = 0, np.float32(np.inf)
    for i in range(basis.shape[1]):
        square = np.float32(0)
        for c in range(j):
            square += basis[c, i] * basis[c, i]
        if square < least:
            best, least = i, square
    return best


@jit
def _squares(x):
    return _product(x, x)


@jit
def _product(x, y):
    zero = np.float32(0)
    a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
    even = x.size // 8 * 8
    for i in range(0, even, 8):
        a += x[i] * y[i]
        b += x[i + 1] * y[i + 1]
        c += x[i + 2] * y[i + 2]
        d += x[i + 3] * y[i + 3]
        e += x[i + 4] * y[i + 4]
        f += x[i + 5] * y[i + 5]
        g += x[i + 6] * y[i + 6]
        h += x[i + 7] * y[i + 7]
    for i in range(even, x.size):
        a += x[i] * y[i]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def project(
    buffer: Tensor, bases: Tensor, factors: Factors, pending: Pending | None
) -> tuple[Tensor, ...]:
    """Return M·Q of each matrix; see ``kernels.low_rank``."""
    found = buffer.new_empty(factors.left)
    _project(buffer.numpy(), bases.numpy(), found.numpy(), factors.places)
    return (found,)


@_any_order
def _project(buffer, bases, found, places):
    for start, n, m, rank, p_at, q_at in places[:, :6]:
        matrix = buffer[start : start + n * m].reshape(n, m)
        basis = bases[q_at : q_at + rank * m].reshape(rank, m)
        into = found[p_at : p_at + n * rank].reshape(n, rank)
        for c in range(0, rank, 2):
            paired = min(c + 1, rank - 1)  # the last column may be its own pair
            for row in range(n):
                one, other = np.float32(0), np.float32(0)
                for i in range(m):
                    one += matrix[row, i] * basis[c, i]
                    other += matrix[row, i] * basis[paired, i]
                into[row, c], into[row, paired] = one, other


def project_back(
    buffer: Tensor, bases: Tensor, factors: Factors, pending: Pending | None
) -> Tensor:
    """Return Pᵀ·M of each matrix; see ``kernels.low_rank``."""
    found = buffer.new_zeros(factors.right)
    _project_back(buffer.numpy(), bases.numpy(), found.numpy(), factors.places)
    return found


@_any_order
def _project_back(buffer, bases, found, places):
    for start, n, m, rank, p_at, q_at in places[:, :6]:
        x = buffer[start : start + n * m].reshape(n, m)
        basis = bases[p_at : p_at + rank * n].reshape(rank, n)
        into = found[q_at : q_at + rank * m].reshape(rank, m)
        for row in range(0, n - 3, 4):
            for c in range(rank):
                a, b, d, e = basis[c, row], basis[c, row + 1], basis[c, row + 2], basis[c, row + 3]
                for i in range(m):
                    into[c, i] += (a * x[row, i] + b * x[row + 1, i]) + (
                        d * x[row + 2, i] + e * x[row + 3, i]
                    )
        for row in range(n // 4 * 4, n):
            for c in range(rank):
                for i in range(m):
                    into[c, i] += basis[c, row] * x[row, i]


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
    kept = torch.empty_like(q)
    if out.data_ptr() == buffer.data_ptr():  # nobody wants the rest
        buffer = torch.empty_like(out)
    _apply(*(each.numpy() for each in (buffer, out, p, q, before, kept)), factors.places)
    return kept


@jit
def _apply(buffer, out, p, q, before, kept, places):
    for start, n, m, rank, p_at, q_at in places[:, :6]:
        left = p[p_at : p_at + n * rank].reshape(rank, n)
        right = q[q_at : q_at + m * rank].reshape(rank, m)
        good, highest = _looked_at(right)
        basis = before[q_at : q_at + m * rank].reshape(rank, m)
        columns = kept[q_at : q_at + m * rank].reshape(m, rank)
        _turn(right if good else basis, columns)
        # The factors, which are small, show whether the product can have overflowed.
        sound = highest * _looked_at(left)[1] * np.float32(rank) < np.inf
        x = buffer[start : start + n * m].reshape(n, m)
        product = out[start : start + n * m].reshape(n, m)
        _combine(left, right, x, product, sound)


@jit
def _turn(rows, columns):
    for c in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            columns[i, c] = rows[c, i]


@jit
def _looked_at(factor):
    """Return whether a factor is finite and not all zero, and its largest magnitude or NaN."""
    most, rows, size = np.float32(0), factor.shape[0], factor.shape[1]
    for c in range(rows):
        for i in range(size):
            if not abs(factor[c, i]) < np.inf:
                return False, np.float32(np.nan)
            most = max(most, abs(factor[c, i]))
    return most > 0, most


@jit
def _combine(p, q, x, product, sound):
    """Write P·Qᵀ, of factors given as rows, and subtract it from x."""
    most, rank, (n, m) = np.float32(LARGEST), len(p), x.shape
    sums = np.empty(m, np.float32)
    for row in range(n):
        for c in range(0, rank, 2):
            a, b, other = p[c, row], np.float32(0), c
            if c + 1 < rank:
                b, other = p[c + 1, row], c + 1
            if c == 0:
                for i in range(m):
                    sums[i] = a * q[c, i] + b * q[other, i]
            else:
                for i in range(m):
                    sums[i] += a * q[c, i] + b * q[other, i]
        if sound:
            for i in range(m):
                x[row, i] -= sums[i]  # first: a store to as aligned a place would delay its load
                product[row, i] = sums[i]
        else:  # subtract what is finite, and keep errors so small that their product is
            for i in range(m):
                product[row, i] = sums[i]
                found = sums[i] if abs(sums[i]) < np.inf else np.float32(0)
                x[row, i] = min(max(x[row, i] - found, -most), most)


def _attempt(given: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two small matrices; sums have another order than torch's, so their bits may differ."""
    numbers = given[:1000].clone()
    factors = Factors([0, 500], [(20, 25), (4, 125)], 3, [0, 1])
    columns = torch.linspace(0, 60, factors.right, dtype=torch.float32, device="cpu").sin()
    q = orthonormal(columns, factors, Side.RIGHT)
    (sent,) = project(numbers, q, factors, None)
    p = orthonormal(sent, factors, Side.LEFT)
    back = project_back(numbers, p, factors, None)
    left, out = numbers.clone(), torch.empty_like(numbers)
    kept = apply(left, out, p, back, q, factors, None)
    x, first, second = numbers[:500].view(20, 25), q[:75].view(3, 25), q[75:].view(3, 125)
    mine, other = p[:60].view(3, 20), p[60:].view(3, 4)
    y = numbers[500:].view(4, 125)
    unit = torch.eye(3, dtype=torch.float32, device="cpu")
    for ours, theirs in (
        (second @ second.t(), unit),
        (mine @ mine.t(), unit),
        (sent, torch.cat([(x @ first.t()).view(-1), (y @ second.t()).view(-1)])),
        (back, torch.cat([(mine @ x).view(-1), (other @ y).view(-1)])),
        (out[:500], (mine.t() @ back[:75].view(3, 25)).view(-1)),
        (left, numbers - out),
        (kept[:75].view(25, 3), back[:75].view(3, 25).t()),
    ):
        close = torch.isclose(ours, theirs, atol=1e-5)
        yield close, torch.ones_like(close)


ATTEMPTS = {"low_rank": _attempt}
