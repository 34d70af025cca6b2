"""TopK: send the k elements of greatest magnitude."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Waits
from lightning_gc.compressors.joint import Part, WholeCodec
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec, by_table
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket
from lightning_gc.kernels.sparse import Row, Rule, Selection

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROUNDING = 2.0**-8  # of bfloat16, relative


@dataclass(frozen=True)
class TopK(DensitySparsifier, SparseCodec):
    """Send the k = density·numel elements of greatest magnitude; keep the others as the error.

    ``C(x)_i = x_i`` if ``|x_i|`` is among the k largest, else 0. These are the largest of each
    tensor, as in most code. Aji and Heafield also have one threshold for the whole model, as
    ``ModelTopK`` has; ``HardThreshold`` is one for all, of no fixed k.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.
        value_dtype: of values on the wire; what ``"bfloat16"`` rounds off stays in the error.
        selection: ``"exact"`` sends the k largest. ``"sampled"`` takes less time: it sends the c
            largest, which reach a threshold estimated from a sample. If fewer than 0.8·k reach
            it, it is multiplied by 0.8, four times at most; if more than k do, the k largest of
            those are sent. So c, which differs between workers and steps, is 0.8·k to k, except
            on extremely heavy tails and with fewer nonzero elements. Payload lengths then go
            ahead.

    At density 1 % a sent element takes 40.6 bits, 24.6 with bfloat16.

    Example:
        >>> from lightning_gc import TopK
        >>> TopK(density=0.01).at(0.1).density
        0.1

    Reference:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
        Lin et al., "Deep Gradient Compression", ICLR 2018 (the sampled threshold).
    """

    value_dtype: Literal["float32", "bfloat16"] = "float32"
    selection: Literal["exact", "sampled"] = "exact"
    limits = {
        "value_dtype": (
            "use 'float32' or 'bfloat16'. float16 would lose gradients below 6e-8 for good"
        ),
        "selection": (
            "use 'exact' for the k largest elements, or 'sampled' for about as many in less time"
        ),
    }

    @property
    def waits(self) -> Waits:
        return Waits(1) if self.selection == "sampled" else Waits()

    @property
    def ragged(self) -> bool:
        return self.selection == "sampled"

    @property
    def sent_dtype(self) -> torch.dtype:
        return _DTYPES[self.value_dtype]

    def most(self, numel: int) -> int:
        return self.count(numel)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        k = self.most(buffer.numel())
        if self.selection == "sampled":
            return topk_selection.about_largest(buffer, k, bucket.step)
        return topk_selection.largest(buffer, k)

    @property
    def whole(self) -> WholeCodec:
        return replace(super().whole, joint=by_table(TopK, _selection))

    def _row(self, part: Part) -> Row:
        k = self.most(part.numel)
        row = Row(part.place, part.start, part.stop, k)
        if not self.ragged:
            return row
        apart = topk_selection.stride(k, part.numel)
        least = topk_selection.enough(k)
        return row._replace(apart=apart, rank=topk_selection.rank(k, part.numel), least=least)

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, less rounding; reached when all magnitudes are equal.

        With sampled selection r / numel, where r elements of the sample reach the threshold; it is
        met if all others are next to zero. If the sample is like the tensor, δ ≥ 0.8·k / numel.
        """
        sent = self.most(numel)
        if self.selection == "sampled":
            sent = topk_selection.rank(sent, numel)
        kept = 1.0 if self.value_dtype == "float32" else 1 - _ROUNDING**2
        return Contraction(kept * sent / max(1, numel))

    @classmethod
    def examples(cls) -> tuple[TopK, ...]:
        return (cls(0.1), cls(1.0), cls(0.1, "bfloat16"), cls(0.1, selection="sampled"))


def _selection(parts: tuple[Part, ...]) -> Selection:
    rule: Rule = "sampled" if parts[0].codec.ragged else "largest"
    return Selection(rule, tuple(part.codec._row(part) for part in parts))
