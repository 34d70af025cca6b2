"""GradiVeQ: project slices of the gradient on principal components of slices of earlier steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Collective, Contraction, Knob, Waits, dense
from lightning_gc.compressors.low_rank.factorisation import RANK, RANKS
from lightning_gc.core import (
    Bucket,
    Choice,
    Field,
    Flow,
    Mean,
    Numbers,
    Range,
    Record,
    Structure,
    Wire,
)
from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import OneOf
from lightning_gc.kernels.dispatch import used_here

_SENDABLE = 2.0**-16  # as of ``LowRank``
_ROUNDING = 1.01  # by how much what is at most 1 may exceed it


@dataclass(frozen=True)
class GradiVeQ(Collective):
    """Cut gradients into slices, and send their coordinates in a basis learnt from earlier ones.

    A tensor is cut into rows of ``slice_size`` elements, a matrix M_i on worker i. In cycles of
    ``every`` steps the first ``dense_steps`` send everything, and all workers add up
    ``S = Σ MᵀM/‖M‖²`` of the mean M. Then U, the ``rank`` eigenvectors of S with the largest
    eigenvalues, is used for the rest of the cycle: ``C(M_i) = M_i·U·Uᵀ``; ``M_i·U`` is
    sent. That is linear: coordinates are added up on the way, and the bytes do not grow with W.

    The method needs similar slices, over steps and within a tensor; the part they share
    is found once a cycle, not in each step as by ``PowerSGD``.

    Our reading of the paper: principal components about zero, so that zeros stay zeros; slices in
    the order in which a tensor lies in memory; and error feedback, by default, for what is not in
    the span of U. Errors that no U of any cycle reaches are sent in the dense steps. A parameter
    with zero gradients in all dense steps of a cycle, as of one of two networks that are
    trained in turns, is sent whole until it has others.

    Args:
        rank: columns of U, at least 1. Higher means less compression.
        slice_size: elements of a slice, above ``rank``. Higher means more compression. S and U are
            of that size, and each tensor's eigenvectors take ``O(slice_size³)`` once a cycle; a
            GPU's host waits for them.
        every: steps of a cycle, above ``dense_steps``. Higher means more compression.
        dense_steps: steps at the beginning of a cycle that send everything, at least 1.

    Communication pattern:
        One all-reduce: ``2·(W−1)/W`` times ``32·rank/slice_size`` bits an element: 2 for the
        defaults; 32 in dense steps, which makes 5 on average.

    State:
        S during the dense steps, ``slice_size²`` numbers; then U. Equal on all workers.

    Raises:
        ValueError: settings outside their ranges.

    Example:
        >>> from lightning_gc import GradiVeQ
        >>> GradiVeQ(rank=8).compresses((512, 512)), GradiVeQ(rank=8).compresses((512,))
        (True, False)

    Reference:
        Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram and Avestimehr, "GradiVeQ: Vector
        Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN Training",
        NeurIPS 2018.
    """

    rank: int = 16
    slice_size: int = 256
    every: int = 100
    dense_steps: int = 10
    limits = {"rank": RANKS, "slice_size": "[2, inf)", "dense_steps": "[1, inf)"}

    traits = replace(
        RANK,
        linear=True,
        knob=Knob("rank", low=1, high=128, integer=True),
        space=(Range("rank", 4, 64, integer=True), Choice("slice_size", (128, 256, 512))),
    )

    waits = Waits(0, 2)  # whether something has been seen, and for eigenvectors, once a cycle

    def __post_init__(self) -> None:
        if self.every <= self.dense_steps:
            refuse("GradiVeQ", f"give more than dense_steps={self.dense_steps}", every=self.every)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether there are more slices than coordinates of one, and fewer coordinates."""
        slices = math.prod(shape) // self.slice_size
        return self.rank < self.slice_size and slices > self.rank

    def compressing_step(self, step: int) -> int:
        return step + max(0, self.dense_steps - step % self.every)

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        if not self.compresses(bucket.shape):
            yield from dense(buffer, out)
            return
        (state,) = bucket.state.values()
        phase = bucket.step % self.every
        if phase == 0:
            state.clear()
        if phase < self.dense_steps or not self._knows(state):
            yield from dense(buffer, out)
            self._learn(out, state)
            return
        used_here(state["basis"])
        # Fewer columns than ``rank`` if that was less when U was made.
        basis = state["basis"].to(buffer)[:, : self.rank]  # (slice_size, r)
        rows = self._rows(buffer)  # (n, slice_size)
        own = rows @ basis  # (n, r)
        sent = (own @ basis.t()).view(-1)[: buffer.numel()]
        bucket.tally.count(buffer.numel(), buffer.numel(), (own,))
        (mean,) = yield Mean((own,))
        most = torch.finfo(buffer.dtype).max * _SENDABLE
        # An own gradient so large that its coordinates overflow would do so again in every step.
        buffer.sub_(sent.nan_to_num(0.0, 0.0, 0.0)).clamp_(-most, most)
        out.copy_((mean.to(buffer.dtype) @ basis.t()).view(-1)[: out.numel()])

    def _learn(self, mean: Tensor, state: dict[str, Any]) -> None:
        """Add ``MᵀM/‖M‖²`` to the moment S, unless the mean is zero or not finite."""
        rows = self._rows(mean)
        largest = rows.abs().amax()
        rows = rows / largest.where(largest > 0, 1.0)  # squares of 1e30 overflow
        moment = rows.t() @ rows / rows.square().sum().clamp_min(1)
        moment = moment.where(moment.isfinite().all(), 0.0)
        kept = state.get("moment")
        if kept is not None:
            used_here(kept)
            moment = moment + kept.to(moment)
        state["moment"] = moment

    def _knows(self, state: dict[str, Any]) -> bool:
        """Return whether U is known; compute it at the end of dense steps, unless S is zero."""
        moment = state.get("moment")
        if moment is not None:
            used_here(moment)
            if moment.any():
                vectors = torch.linalg.eigh(moment.double()).eigenvectors  # eigenvalues ascend
                state.clear()
                state["basis"] = vectors.flip(1)[:, : self.rank].to(moment)
        return "basis" in state

    def _rows(self, flat: Tensor) -> Tensor:
        return pad(flat, (0, -flat.numel() % self.slice_size)).view(-1, self.slice_size)

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        """Return the structure of S, a sum over at most a cycle, or of U with unit columns."""
        size = self.slice_size
        most = self.every * _ROUNDING
        return OneOf(
            Record({"moment": Numbers((size, size), -most, most)}),
            Record({"basis": Numbers((size, (1, size)), -_ROUNDING, _ROUNDING)}),
        )

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: it is a projection, but the gradient may be orthogonal to its span."""
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        if not self.compresses((numel,)):
            return (Field("values", torch.float32, numel),)
        rows = -(-numel // self.slice_size)
        note = "(slices, rank); in dense steps the tensor"
        return (Field("coordinates", torch.float32, rows * self.rank, note=note),)

    @classmethod
    def examples(cls) -> tuple[GradiVeQ, ...]:
        return (cls(3, 16, every=4, dense_steps=1), cls(1, 8, every=3, dense_steps=2))
