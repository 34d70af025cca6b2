"""LowRank: base class of methods that send a matrix as two thin factors, by two all-reduces."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lightning_gc.compressors.base import BatchedCollective, Contraction, Knob, Traits, dense
from lightning_gc.core import (
    Bucket,
    Field,
    Flow,
    Mean,
    Numbers,
    Range,
    Record,
    Structure,
    Wire,
    payload_validation,
    together,
)
from lightning_gc.core.state_structure import NOTHING
from lightning_gc.kernels.dispatch import used_here

RANK = Traits(
    kind="low rank",
    portable=False,
    knob=Knob("rank", low=1, high=256, integer=True),
    space=(Range("rank", 1, 8, integer=True),),
)
"""A low-rank method with a field ``rank``."""

_SENDABLE = 2.0**-16
"""Share of the largest float that matrices of up to 2^32 such elements can be multiplied by."""


@dataclass(frozen=True)
class LowRank(BatchedCollective):
    """Send M as ``C = P·Qᵀ``: P from the mean of M_i·Q, then Q from the mean of M_iᵀ·P.

    Subclasses compute P from the first mean (``basis``) and Q from the second (``fit``), the same
    on all workers. Q is the previous step's, orthonormalised, and random at first. All apply C, and
    worker i keeps ``M_i − C``. Thin factors of all matrices of one shape are computed together.
    Fields are as in ``PowerSGD``.
    """

    rank: int = 2
    min_ratio: float = 2.0
    dense_steps: int = 0

    traits = replace(RANK, linear=True)

    def __post_init__(self) -> None:
        check_rank(type(self).__name__, self.rank)
        if not self.min_ratio >= 0 or self.dense_steps < 0:
            raise ValueError(f"{self!r}: min_ratio and dense_steps must be at least 0.")

    @abc.abstractmethod
    def basis(self, p: Tensor) -> Tensor:
        """Return P of g matrices, ``(g, n, r)``, from M_i·Q; every worker then sends M_iᵀ·P."""

    def fit(self, q: Tensor, p: Tensor) -> Tensor:
        """Return Q, ``(g, m, r)``, from the mean of M_iᵀ·P."""
        return q

    def compresses(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return False
        n, m = sides(shape)
        return self.min_ratio * self.rank * (n + m) < n * m

    def compressing_step(self, step: int) -> int:
        return max(step, self.dense_steps)

    def rounds_of_equals(
        self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Flow:
        shape, step = buckets[0].shape, buckets[0].step
        if not self.compresses(shape) or step < self.dense_steps:
            yield from together(list(map(dense, buffers, outs)), buckets[0].workers)
            return
        matrices = [buffer.view(shape[0], -1) for buffer in buffers]  # (n, m) each
        states = [state for bucket in buckets for (state,) in [bucket.state.values()]]
        columns = [
            self._columns(state.get("q"), matrix, bucket)
            for state, matrix, bucket in zip(states, matrices, buckets, strict=True)
        ]
        # Thin factors are stacked, and what is done to them is done to all at once. Matrices are
        # not: a copy of them takes longer, from 128 columns on, than a product for each.
        before = orthonormal(_stacked(columns))  # (g, m, r)
        # Thin factors whose columns lie together: on the host products take a fifth of the time.
        p = _stacked(list(map(torch.mm, matrices, before.mT.contiguous().mT)))  # (g, n, r)
        (p,) = yield Mean((p,))
        p = self.basis(p)
        across = p.mT.contiguous()
        own = _stacked(list(map(torch.mm, across, matrices)))
        for bucket, *sent in zip(buckets, p, own, strict=True):
            bucket.tally.count(buffers[0].numel(), buffers[0].numel(), tuple(sent))
        (rows,) = yield Mean((own,))  # (g, r, m)
        q = self.fit(rows.mT.contiguous(), p)  # (g, m, r)
        # A Q of zeros, or one that is not finite, would stay so for ever.
        good = (q.isfinite().flatten(1).all(1) & q.flatten(1).any(1)).view(-1, 1, 1)
        for state, kept in zip(states, torch.where(good, q, before), strict=True):
            state["q"] = kept.clone() if len(states) > 1 else kept  # not a view of all others'
        # The factors, which are small, show whether the product can have overflowed.
        largest = p.abs().amax((1, 2)) * q.abs().amax((1, 2)) * p.shape[2]
        sound = largest.isfinite().tolist() if payload_validation.on_host(p) else [False] * len(p)
        for buffer, out, left, right, fits in zip(buffers, outs, p, q, sound, strict=True):
            _apply(buffer, out, left, right, fits)

    def _columns(self, kept: Tensor | None, matrix: Tensor, bucket: Bucket) -> Tensor:
        """Return ``(m, r)``: columns of the step before, and new ones where there are too few."""
        rank, rows = min(self.rank, *matrix.shape), matrix.shape[1]
        if kept is None or kept.shape[0] != rows:  # another shape, loaded without strictness
            kept = matrix.new_empty(rows, 0)
        used_here(kept)
        kept = kept[:, :rank].to(matrix)
        if kept.shape[1] == rank:
            return kept
        draw, shape = bucket.generator(shared=True), (rows, rank - kept.shape[1])
        fresh = torch.randn(shape, generator=draw, device=matrix.device, dtype=matrix.dtype)
        return torch.cat([kept, fresh], dim=1)

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        """Return Q of a matrix; its number of columns may be an earlier rank."""
        if len(shape) < 2:
            return NOTHING
        n, m = sides(shape)
        return Record({"q": Numbers((m, (1, min(n, m))))})

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: for one worker it is a projection, but of how much is not known."""
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        """Return the factors of a nearly square matrix, or all values if it is sent dense."""
        n, m = sides((numel,))
        if not self.compresses((n, m)):
            return (Field("values", torch.float32, numel),)
        rank = min(self.rank, n, m)
        return (
            Field("p", torch.float32, n * rank, note="(n, rank) of an n x m matrix"),
            Field("q", torch.float32, m * rank, note="(rank, m)"),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (cls(1), cls(2, dense_steps=1), cls(4, min_ratio=0.0))


def check_rank(name: str, rank: float) -> None:
    """Raise ValueError unless the rank is a number of columns."""
    if not 1 <= rank < math.inf or rank != int(rank):
        said = f"{name}(rank={rank!r})"
        raise ValueError(f"{said}: the rank is a number of columns, 1 or more; use 2.")


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; a tensor of one dimension is folded into nearly a square."""
    if len(shape) > 1:
        return shape[0], math.prod(shape[1:])
    rows = max(1, math.isqrt(math.prod(shape)))
    return rows, -(-math.prod(shape) // rows)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal bases whose spans hold those of ``(..., n, r)`` columns, zeros included.

    Columns are scaled first: 1e38 squared is not finite, and 1e-40 squared is zero.
    """
    longest = columns.abs().amax(-2, keepdim=True)
    basis: Tensor = torch.linalg.qr(columns / longest.where(longest > 0, 1.0)).Q
    return basis


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Return them along a new first dimension: of one tensor a view, as most shapes occur once."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _apply(buffer: Tensor, out: Tensor, p: Tensor, q: Tensor, sound: bool) -> None:
    """Write ``P·Qᵀ`` to ``out`` and subtract it from ``buffer``; they may be one tensor."""
    aliased = out.data_ptr() == buffer.data_ptr()
    product = torch.empty_like(out) if aliased else out
    torch.mm(p, q.t(), out=product.view(len(p), -1))
    if sound:
        buffer.sub_(product)
    else:
        # NaN and overflow are in ``out``, and are subtracted from no error. An own gradient so
        # large that it overflows would do so again in every step.
        most = torch.finfo(buffer.dtype).max * _SENDABLE
        buffer.sub_(product.nan_to_num(0.0, 0.0, 0.0)).clamp_(-most, most)
    if aliased:
        out.copy_(product)
