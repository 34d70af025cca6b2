"""What methods share that send a matrix as two thin factors, each the mean over all workers."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Compressor, Contraction, Knob, dense
from lightning_gc.flow import Flow, Mean
from lightning_gc.search_space import Range

if TYPE_CHECKING:
    from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class LowRank(Compressor):
    """Sends M as ``C = P·Qᵀ``: P from the mean of M_i·Q, then Q from the mean of M_iᵀ·P.

    Methods differ in what they make of either mean: ``basis`` and ``fit``. Both are computed alike
    by all workers. Q is that of the step before, orthonormalised, at first random. All apply C, and
    worker i keeps ``M_i − C``.

    Args:
        rank: columns of P and Q, at least 1. Higher means less compression, less error.
        min_ratio: a tensor is compressed if that makes it smaller by more than this factor:
            ``min_ratio·rank·(n + m) < n·m``.
        dense_steps: steps at the beginning that send everything exactly.

    Raises:
        ValueError: ``rank`` below 1 or no whole number, a negative ``min_ratio`` or
            ``dense_steps``.
    """

    rank: int = 2
    min_ratio: float = 2.0
    dense_steps: int = 0

    kind = "low rank"
    linear = True
    averages = True
    knob = Knob("rank", low=1, high=256, integer=True)
    space = (Range("rank", 1, 8, integer=True),)

    def __post_init__(self) -> None:
        check_rank(type(self).__name__, self.rank)
        if not self.min_ratio >= 0 or self.dense_steps < 0:
            raise ValueError(f"{self!r}: min_ratio and dense_steps must be at least 0.")

    @abc.abstractmethod
    def basis(self, p: Tensor) -> Tensor:
        """Return P, ``(n, r)``, of which every worker sends M_iᵀ·P, from the mean of M_i·Q."""

    def fit(self, q: Tensor, p: Tensor) -> Tensor:
        """Return Q, ``(m, r)``, from the mean of M_iᵀ·P."""
        return q

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether two factors are smaller than the matrix by more than ``min_ratio``."""
        if len(shape) < 2:
            return False
        n, m = shape[0], math.prod(shape[1:])
        return self.min_ratio * self.rank * (n + m) < n * m

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Average P, average Q, multiply."""
        if not self.compresses(bucket.shape) or bucket.step < self.dense_steps:
            yield from dense(buffer, out)
            return
        matrix = buffer.view(bucket.shape[0], -1)  # (n, m)
        (state,) = bucket.state.values()
        before = orthonormal(self._columns(state.get("q"), matrix, bucket))  # (m, r)
        (p,) = yield Mean((matrix @ before,))
        p = self.basis(p)  # (n, r)
        own = matrix.t() @ p  # (m, r)
        bucket.tally.count(buffer.numel(), buffer.numel(), (p, own))
        (q,) = yield Mean((own,))
        q = self.fit(q, p)
        # What is zero or not finite would stay so for ever.
        good = q.isfinite().all() & q.any()
        state["q"] = torch.where(good, q, before)
        product = (p @ q.t()).view(-1)
        buffer.sub_(product)
        out.copy_(product)

    def _columns(self, kept: Tensor | None, matrix: Tensor, bucket: Bucket) -> Tensor:
        """Return ``(m, r)``: columns of the step before, and new ones where there are too few."""
        rank, rows = min(self.rank, *matrix.shape), matrix.shape[1]
        if kept is None or kept.shape[0] != rows:  # another shape, loaded without strictness
            kept = matrix.new_empty(rows, 0)
        kept = kept[:, :rank].to(matrix)
        if kept.shape[1] == rank:
            return kept
        draw, shape = bucket.generator(shared=True), (rows, rank - kept.shape[1])
        fresh = torch.randn(shape, generator=draw, device=matrix.device, dtype=matrix.dtype)
        return torch.cat([kept, fresh], dim=1)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: for one worker a projection, usually a good one, but none is promised."""
        return Contraction(0.0)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """One column; several, after a dense step; more than a small matrix has."""
        return (cls(1), cls(2, dense_steps=1), cls(4, min_ratio=0.0))


def check_rank(name: str, rank: float) -> None:
    """Refuse a rank that is no number of columns."""
    if not 1 <= rank < math.inf or rank != int(rank):
        raise ValueError(
            f"{name}(rank={rank!r}): the rank is a number of columns, 1 or more; use 2."
        )


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis whose span holds that of ``(n, r)`` columns, zeros included."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis
