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

from lightning_gc.core.segments import pieces_of

Rule = Literal["largest", "sampled", "reaching", "chunks"]

PIECE = 1 << 14
"""Elements of a part that one program of a GPU reads at most: a bucket has enough to fill it."""
_TILE = 1 << 11
MOST_IN_CHUNK = 1 << 13
"""Elements of a chunk that a program of a GPU can keep in registers."""
FACTOR = 0.8
"""By what a sampled threshold is lowered, and the share of k below which too few reach it."""
CORRECTIONS = 4
"""How often a sampled threshold is lowered at most."""


class Row(NamedTuple):
    """A part of a bucket, and which of its elements are sent.

    Attributes:
        place: index of the parameter among the bucket's that are not empty.
        start, stop: first element and end.
        number: k, the number of elements sent; an upper limit if the rule has a threshold.
        apart: distance of the elements of a sample; elements of a chunk.
        rank: of the threshold in the sample; number sent of each chunk.
        least: number of elements that must reach the threshold, or it is lowered; number sent of a
            last, shorter chunk.
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
            ``"chunks"``: the largest of each chunk.
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
        """The rows, ``(n, 8)`` int64; for the rule ``"chunks"`` a row of each chunk."""
        if self.rule != "chunks":
            return np.array(self.rows, np.int64)
        return np.array([chunk for row in self.rows for chunk in chunks(row)], np.int64)

    @functools.cached_property
    def on(self) -> Callable[[torch.device], tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return what kernels on a device read, from a cache.

        Pieces of the rows; the rows, each with its first piece and the number sent before it,
        ``(n, 10)``; their numbers, ``(n,)``; and ``most``, ``(1,)``. All are int32.
        """

        def made(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            places = [(i, row.start, row.stop, row.start) for i, row in enumerate(self.rows)]
            pieces = pieces_of(places, device, PIECE)
            counts = [-(-(row.stop - row.start) // PIECE) for row in self.rows]
            first = itertools.accumulate(counts[:-1], initial=0)
            numbers = [row.number for row in self.rows]
            before = itertools.accumulate(numbers[:-1], initial=0)
            rows = [(*row, *more) for row, *more in zip(self.rows, first, before, strict=True)]
            as_int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
            return pieces, as_int32(rows), as_int32(numbers), as_int32([self.most])

        return functools.cache(made)

    @functools.cached_property
    def tiles(self) -> Callable[[torch.device], tuple[Tensor, int, int]]:
        """Return tiles of chunks on a device, from a cache: what a program takes at once.

        Index of the row and first chunk of each tile, ``(m, 2)`` int32; chunks of a tile, and the
        elements for which a chunk has room, both powers of two.
        """

        def made(device: torch.device) -> tuple[Tensor, int, int]:
            width = 1 << (max(row.apart for row in self.rows) - 1).bit_length()
            together = max(1, _TILE // width)
            found = [
                (index, chunk)
                for index, row in enumerate(self.rows)
                for chunk in range(0, -(-(row.stop - row.start) // row.apart), together)
            ]
            table = torch.tensor(found, dtype=torch.int32, device=device)
            return table, together, width

        return functools.cache(made)


def chunks(row: Row) -> list[Row]:
    """Return a row of the rule ``"largest"`` for each chunk of ``row``."""
    starts = range(row.start, row.stop, row.apart)
    stops = [min(start + row.apart, row.stop) for start in starts]
    return [
        Row(row.place, start, stop, row.rank if stop - start == row.apart else row.least)
        for start, stop in zip(starts, stops, strict=True)
    ]


def bits_of(threshold: float) -> int:
    """Return the bits of a magnitude as float32."""
    return int(torch.tensor(threshold, dtype=torch.float32, device="cpu").view(torch.int32))
