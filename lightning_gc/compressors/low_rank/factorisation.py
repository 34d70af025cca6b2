"""LowRank: base class of methods that send a matrix as two thin factors, by two all-reduces."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lightning_gc.compressors.base import BatchedCollective, Contraction, Knob, Traits, dense
from lightning_gc.compressors.joint import JointCollective, Part
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
from lightning_gc.core.saved_state import NOTHING
from lightning_gc.kernels.dispatch import used_here

RANKS = "[1, inf) the number of columns; 2"
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
    worker i keeps ``M_i − C``. Fields are as in ``PowerSGD``.
    """

    rank: int = 2
    min_ratio: float = 2.0
    dense_steps: int = 0
    limits = {"rank": RANKS, "min_ratio": "[0, inf]", "dense_steps": "[0, inf)"}

    traits = replace(RANK, linear=True)

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

    def for_shape(self, shape: tuple[int, ...]) -> Self | None:
        return self if self.compresses(shape) else None

    def join(self, parts: tuple[Part, ...], shapes: Sequence[tuple[int, ...]]) -> Matrices:
        return Matrices(parts, shapes)

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


@dataclass(frozen=True, eq=False)
class Matrices(JointCollective):
    """Exchange matrices of a bucket by the rounds of a ``LowRank``, those of one shape together."""

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        if bucket.step < self.codec.dense_steps:
            spans = [slice(part.start, part.stop) for part in self.parts]
            flows = [dense(buffer[span], out[span]) for span in spans]
        else:
            flows = [
                self._of_one_shape(parts, shape, bucket, buffer, out)
                for shape, parts in self._by_shape.items()
            ]
        yield from together(flows, bucket.workers)

    @functools.cached_property
    def _by_shape(self) -> dict[tuple[int, ...], list[Part]]:
        found: dict[tuple[int, ...], list[Part]] = {}
        for part, shape in zip(self.parts, self.shapes, strict=True):
            found.setdefault(shape, []).append(part)
        return found

    def _of_one_shape(
        self,
        parts: Sequence[Part],
        shape: tuple[int, ...],
        bucket: Bucket,
        buffer: Tensor,
        out: Tensor,
    ) -> Flow:
        if not self.codec.compresses(shape):
            (part,) = parts
            yield from dense(buffer[part.start : part.stop], out[part.start : part.stop])
            return
        matrices = [buffer[part.start : part.stop].view(shape[0], -1) for part in parts]  # (n, m)
        columns = [
            self.columns(part, sides(shape), bucket, buffer) for part in parts
        ]  # (m, r) each
        # Thin factors are stacked, and what is done to them is done to all at once. Matrices are
        # not: a copy of them takes longer, from 128 columns on, than a product for each.
        before = orthonormal(_stacked(columns))  # (g, m, r)
        # The columns of thin factors lie together: on the host products take a fifth of the time.
        p = _stacked(list(map(torch.mm, matrices, before.mT.contiguous().mT)))  # (g, n, r)
        (p,) = yield Mean((p,))
        p = self.codec.basis(p)
        across = p.mT.contiguous()
        own = _stacked(list(map(torch.mm, across, matrices)))
        numel = sum(part.numel for part in parts)
        bucket.tally.count(numel, numel, (p, own))
        (rows,) = yield Mean((own,))  # (g, r, m)
        q = self.codec.fit(rows.mT.contiguous(), p)  # (g, m, r)
        # A Q of zeros, or one that is not finite, would stay so for ever.
        good = (q.isfinite().flatten(1).all(1) & q.flatten(1).any(1)).view(-1, 1, 1)
        for part, kept in zip(parts, torch.where(good, q, before), strict=True):
            bucket.state[part.name]["q"] = kept
        # The factors, which are small, show whether the product can have overflowed.
        largest = p.abs().amax((1, 2)) * q.abs().amax((1, 2)) * p.shape[2]
        sound = largest.isfinite().tolist() if payload_validation.on_host(p) else [False] * len(p)
        for part, left, right, fits in zip(parts, p, q, sound, strict=True):
            span = slice(part.start, part.stop)
            _apply(buffer[span], out[span], left, right, fits)

    def columns(
        self, part: Part, matrix: tuple[int, int], bucket: Bucket, buffer: Tensor
    ) -> Tensor:
        """Return ``(m, r)``: columns of the step before, and new ones where there are too few."""
        kept, rank, rows = (
            bucket.state[part.name].get("q"),
            min(self.codec.rank, *matrix),
            matrix[1],
        )
        if kept is None or kept.shape[0] != rows:  # another shape, loaded without strictness
            kept = buffer.new_empty(rows, 0)
        used_here(kept)
        kept = kept[:, :rank].to(buffer)
        if kept.shape[1] == rank:
            return kept
        draw = bucket.part(part.name, part.start, part.stop).generator(shared=True)
        shape = (rows, rank - kept.shape[1])
        fresh = torch.randn(shape, generator=draw, device=buffer.device, dtype=buffer.dtype)
        return torch.cat([kept, fresh], dim=1)


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; a tensor of one dimension is folded into nearly a square."""
    if len(shape) > 1:
        return shape[0], math.prod(shape[1:])
    rows = max(1, math.isqrt(math.prod(shape)))
    return rows, -(-math.prod(shape) // rows)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal bases that span all of ``(..., n, r)`` columns, zeros included.

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
