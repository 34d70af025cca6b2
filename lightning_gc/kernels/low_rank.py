"""Factor all matrices of a bucket at once, by kernels of its device.

A family of kernels, ``kernels.gpu.low_rank`` or ``kernels.host.low_rank``, has four functions.
Factors are flat, those of all matrices one after the other. A basis lies as rows of ``(r, size)``.

- ``orthonormal(columns, factors, side)``: bases of ``(size, r)`` columns each.
- ``project(buffer, bases, factors, pending)``: the payload ``(M·Q,)``, ``(n, r)`` each.
- ``project_back(buffer, bases, factors, pending)``: ``Pᵀ·M``, ``(r, m)`` each.
- ``apply(buffer, out, p, q, before, factors, pending)``: write ``P·Qᵀ`` to ``out``, subtract it
  from ``buffer`` unless both are one tensor, and return columns for the next step, ``(m, r)`` each:
  Q, or ``before`` where Q is zero or not finite.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.kernels.dispatch import compiled, family, fused

MAX_RANK = 16
"""Columns of a factor that a program on a GPU holds at most."""
MAX_RANK_ON_HOST = 8
"""Columns of a factor up to which the kernels are faster than torch's products."""
LEAST = 2.0**-40
"""Share of a column's square below which what others do not span is rounding."""
LARGEST = float(np.finfo(np.float32).max) * 2.0**-16
"""Errors are kept below it, so that matrices of up to 2^32 elements have finite products."""


class Side(enum.IntEnum):
    """A factor of a matrix: P has its rows, Q its columns."""

    LEFT = 0
    RIGHT = 1


ROWS, COLUMNS = 16, 64
"""Elements of a matrix that a program on a GPU reads at a time."""
TILE = 1 << 14
"""Elements of a tile of rows, about."""


class Tiles:
    """Matrices cut into tiles, for programs on a GPU that sum along rows or along columns.

    Args:
        places: of the matrices, as in ``Factors``.
        sizes: rows and columns of each matrix's tiles, at most.
        along_rows: whether sums are along rows. Tiles of the same rows then share sums.

    Attributes:
        count: of tiles.
        sums: elements of all sums that tiles share.
        counters: of groups of tiles that share sums.
        table: returns, for a device, ``(count, 9)`` int32: the matrix, first row and end, first
            column and end, the tile's number in its group, the group's tiles, its counter, and the
            place of the tile's sums.
    """

    def __init__(self, places: Any, sizes: Sequence[tuple[int, int]], *, along_rows: bool) -> None:
        rows = list[tuple[int, ...]]()
        self.sums = self.counters = 0
        for index, (_, n, m, r, *_) in enumerate(places.tolist()):
            high, wide = sizes[index]
            down = [(row, min(row + high, n)) for row in range(0, n, high)]
            across = [(column, min(column + wide, m)) for column in range(0, m, wide)]
            groups = [[(a, b) for b in across] for a in down]
            if not along_rows:
                groups = [[(a, b) for a in down] for b in across]
            for group in groups:
                (begin, end), _ = group[0]
                each = r * (end - begin if along_rows else COLUMNS) if len(group) > 1 else 0
                for number, (a, b) in enumerate(group):
                    rows.append((index, *a, *b, number, len(group), self.counters, self.sums))
                    self.sums += each
                self.counters += len(group) > 1
        self.count = len(rows)
        self.table = functools.cache(functools.partial(_int32, rows))


def _int32(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _multiple(rows: int) -> int:
    """Return at least that many rows, in full reads."""
    return max(1, -(-rows // ROWS)) * ROWS


class Factors:
    """The places of a bucket's matrices, and of their factors.

    Args:
        starts: first element of each matrix in the bucket.
        sides: rows n and columns m of each matrix.
        rank: columns of factors; fewer where a side is shorter.
        indices: of each parameter among the bucket's that are not empty.
        wide: columns of a tile that is summed along rows, at most.
        tall: rows of a tile that is summed along columns, at most.

    Attributes:
        places: ``(g, 8)`` int64: start, n, m, r, places of P and Q, index, 0.
        numel, left, right: elements of all matrices, of all P, and of all Q.
        rank: the greatest r.
    """

    def __init__(
        self,
        starts: Sequence[int],
        sides: Sequence[tuple[int, int]],
        rank: int,
        indices: Sequence[int],
        wide: int = 1 << 12,
        tall: int = 1 << 10,
    ) -> None:
        rows, self.numel, self.left, self.right = [], 0, 0, 0
        for start, (n, m), index in zip(starts, sides, indices, strict=True):
            r = min(rank, n, m)
            rows.append((start, n, m, r, self.left, self.right, index, 0))
            self.numel += n * m
            self.left += n * r
            self.right += m * r
        self.places = np.array(rows, np.int64)
        self.rank = int(self.places[:, 3].max())
        self._shapes = [(m, r) for _, _, m, r, *_ in rows]
        self._limits = wide, tall
        self.table = functools.cache(functools.partial(_int32, rows))

    @functools.cached_property
    def by_rows(self) -> Tiles:
        """Tiles of whole rows if they are short enough, for sums along rows."""
        wide, _ = self._limits
        high = [_multiple(TILE // min(m, wide)) for m, _ in self._shapes]
        return Tiles(self.places, [(rows, wide) for rows in high], along_rows=True)

    @functools.cached_property
    def by_columns(self) -> Tiles:
        """Tiles of few columns, for sums along columns."""
        _, tall = self._limits
        return Tiles(self.places, [(tall, COLUMNS)] * len(self.places), along_rows=False)

    def columns_of(self, flat: Tensor) -> list[Tensor]:
        """Return views of all Q, ``(m, r)`` each."""
        pieces = flat.split([m * r for m, r in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def together(self, kept: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
        """Return the tensor that ``columns_of`` has cut into ``kept``; None for separate tensors.

        Tensors of another dtype or device than ``like`` count as separate.
        """
        first = kept[0]
        if first is None or (first.dtype, first.device) != (like.dtype, like.device):
            return None
        address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
        for each, shape in zip(kept, self._shapes, strict=True):
            if each is None or each.shape != shape or each.data_ptr() != address:
                return None
            if not each.is_contiguous() or each.untyped_storage().data_ptr() != storage:
                return None
            address += 4 * each.numel()
        return first.as_strided((self.right,), (1,))


def kernels_for(buffer: Tensor, rank: int) -> ModuleType | None:
    """Return the kernels that factor matrices of ``buffer``, or None: then torch does."""
    if fused(buffer, "low_rank") and rank <= MAX_RANK:
        return family("low_rank", buffer)
    if compiled(buffer, "low_rank") and rank <= MAX_RANK_ON_HOST:
        return family("low_rank", buffer)
    return None
