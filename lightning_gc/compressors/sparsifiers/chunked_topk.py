"""ChunkedTopK: send the elements of greatest magnitude of each chunk of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction
from lightning_gc.compressors.joint import Part, WholeCodec
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec, by_table
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket
from lightning_gc.kernels.sparse import MOST_IN_CHUNK, Row, Selection, chunks


@dataclass(frozen=True)
class ChunkedTopK(DensitySparsifier, SparseCodec):
    """Send the k = density·chunk elements of greatest magnitude of each chunk of a tensor.

    ``C(x)_i = x_i`` if ``|x_i|`` is among the k largest of its chunk, else 0. Of equal magnitudes
    the first are sent. Chunks are selected
    from one by one, so nothing sorts or searches a whole tensor, every part of it is heard, and
    each chunk has the same share of what is sent. The last chunk may be shorter, and has k by the
    same density.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.
        chunk: elements of a chunk, at least 1. Smaller means less of a tensor's largest where they
            are close together, as in one row.

    As the paper's 64 of 4,096 an element takes 40 bits: its value, and 8 of its position, by
    Elias-Fano; the paper's offsets in a chunk take 12.

    Example:
        >>> import torch
        >>> from lightning_gc import ChunkedTopK
        >>> from lightning_gc.testing import Lockstep
        >>> given = torch.tensor([4.0, 3.0, 1.0, 2.0])
        >>> Lockstep(1, ChunkedTopK(0.5, chunk=2)).step([{"w": given}]).mean["w"]
        tensor([4., 0., 0., 2.])

    Reference:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, of what many
        local steps have changed; values have 2 bits: ``Quantised(ChunkedTopK(), BinMeans(2))``.
    """

    density: float = 64 / 4096
    chunk: int = 4096
    limits = {"chunk": "[1, inf) a chunk's number of elements"}

    ragged = False

    def most(self, numel: int) -> int:
        full, rest = divmod(numel, self.chunk)
        return full * self.count(self.chunk) + (self.count(rest) if rest else 0)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        full, rest = divmod(buffer.numel(), self.chunk)
        end, k = full * self.chunk, self.count(self.chunk)
        found = topk_selection.largest_of_rows(buffer[:end].view(full, self.chunk), k)
        if not rest:
            return found
        last = topk_selection.largest(buffer[end:], self.count(rest))
        return torch.cat([found, last + end])

    @property
    def whole(self) -> WholeCodec:
        return replace(super().whole, joint=by_table(ChunkedTopK, _selection))

    def _row(self, part: Part) -> Row:
        size = min(self.chunk, part.numel)
        last = self.count(part.numel % size) if part.numel % size else 0
        sent = self.most(part.numel)
        return Row(part.place, part.start, part.stop, sent, size, self.count(size), last)

    def bound(self, numel: int) -> Contraction:
        """Return δ = the least k/chunk of a chunk, reached when all magnitudes are equal."""
        full, rest = divmod(numel, self.chunk)
        shares = [self.count(self.chunk) / self.chunk] if full else []
        shares += [self.count(rest) / rest] if rest else []
        return Contraction(min(shares, default=1.0))

    @classmethod
    def examples(cls) -> tuple[ChunkedTopK, ...]:
        return (cls(0.1, 64), cls(0.3, 7), cls())


def _selection(parts: tuple[Part, ...]) -> Selection:
    rows = tuple(part.codec._row(part) for part in parts)
    if max(row.apart for row in rows) <= MOST_IN_CHUNK:
        return Selection("chunks", rows)
    return Selection("largest", tuple(chunk for row in rows for chunk in chunks(row)))
