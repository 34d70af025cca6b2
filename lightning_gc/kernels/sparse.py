"""Select elements of all parts of a bucket, code their positions, and add what has arrived.

``Selection`` is the table that kernels of whole buckets read. Without kernels the compressors
select part by part, with the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.segments import PIECE, pieces_of

Rule = Literal["largest", "sampled", "reaching"]

FACTOR = 0.8
"""By what a sampled threshold is lowered, and the share of k below which too few reach it."""
CORRECTIONS = 4
"""How often a sampled threshold is lowered at most."""


class Row(NamedTuple):
    """A part of a bucket, and which of its elements are sent.

    Attributes:
        place: index of the parameter among the bucket's that are not empty.
        start, stop: first element and end.
        number: k, the number of elements sent; an upper limit unless the rule is ``"largest"``.
        apart: distance of the elements of a sample.
        rank: of the threshold in the sample.
        least: number of elements that must reach the threshold, or it is lowered.
        limit: bits of the least magnitude that is sent, for the rule ``"reaching"``.
    """

    place: int
    start: int
    stop: int
    number: int
    apart: int = 1
    rank: int = 1
    least: int = 0
    limit: int = 0


@dataclass(frozen=True, eq=False)
class Selection:
    """Which elements of a bucket are sent: a row for each part.

    Args:
        rule: ``"largest"``: the k largest magnitudes. ``"sampled"``: the c largest, where
            ``c ≤ k`` elements reach a threshold from a sample. ``"reaching"``: all from a limit on.
        rows: ascending, not empty.
    """

    rule: Rule
    rows: tuple[Row, ...]

    @functools.cached_property
    def most(self) -> int:
        """The greatest number of elements sent."""
        return sum(row.number for row in self.rows)

    @functools.cached_property
    def on_host(self) -> np.ndarray:
        """The rows, ``(n, 8)`` int64."""
        return np.array(self.rows, np.int64)

    @functools.cached_property
    def on(self) -> Callable[[torch.device], tuple[Tensor, Tensor, Tensor]]:
        """Return what kernels on a device read, from a cache.

        Index of the row, first element and end of each piece, ``(3, m)``; the columns of the rows
        and the first piece of each, ``(9, n)``; and ``most``, ``(1,)``. All are int32.
        """

        def made(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
            pieces = pieces_of([slice(row.start, row.stop) for row in self.rows], device)
            counts = [-(-(row.stop - row.start) // PIECE) for row in self.rows]
            first = itertools.accumulate(counts[:-1], initial=0)
            columns = [*zip(*self.rows, strict=True), tuple(first)]
            table = torch.tensor(columns, dtype=torch.int32, device=device)
            return pieces, table, torch.tensor([self.most], dtype=torch.int32, device=device)

        return functools.cache(made)


def bits_of(threshold: float) -> int:
    """Return the bits of a magnitude as float32."""
    return int(torch.tensor(threshold, dtype=torch.float32, device="cpu").view(torch.int32))
