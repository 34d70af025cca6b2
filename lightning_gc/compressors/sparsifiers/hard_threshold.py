"""HardThreshold: send every element with a magnitude of at least a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_gc.compressors.base import AbsoluteError, Knob, Traits, Waits
from lightning_gc.compressors.joint import Part, WholeCodec
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec, by_table
from lightning_gc.core import Bucket, Range
from lightning_gc.kernels.sparse import Row, Selection, bits_of


@dataclass(frozen=True)
class HardThreshold(SparseCodec):
    """Send all elements of magnitude λ or more, however many; keep the others as the error.

    ``C(x)_i = x_i`` if ``|x_i| ≥ λ``, else 0. One λ for the whole model. With error feedback under
    ``AllGather`` the error of an element is always below λ: an *absolute* compressor, as its error
    does not grow with the gradient.

    The paper proves (Lemma 3), for a *fixed* sequence of tensors without feedback: among
    sparsifiers that send the same number of elements, one with a constant λ leaves the least sum of
    squared errors. With feedback, where what is sent changes what comes next, it calls that minimum
    intractable and proves convergence only.

    Args:
        threshold: λ, in units of the (unscaled) gradient, at least 0. Higher means more
            compression. The paper's rule is ``1 / (2·sqrt(0.001·d))`` for d parameters in all.

    Example:
        >>> from lightning_gc import HardThreshold
        >>> HardThreshold(0.005)
        HardThreshold(threshold=0.005)

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021.
    """

    threshold: float = 0.01
    limits = {"threshold": "[0, inf) the threshold, a magnitude,"}

    traits = Traits(
        kind="sparsifier",
        knob=Knob("threshold", low=1e-9, high=1e30, more="compression"),
        space=(Range("threshold", 1e-5, 0.1, scale="log"),),
    )
    waits = Waits(1)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        return topk_selection.reaching(buffer, self.threshold)

    @property
    def whole(self) -> WholeCodec:
        return replace(super().whole, joint=by_table(HardThreshold, _selection))

    def bound(self, numel: int) -> AbsoluteError:
        """Return v = λ·√numel."""
        return AbsoluteError(self.threshold * math.sqrt(numel))

    @classmethod
    def examples(cls) -> tuple[HardThreshold, ...]:
        return (cls(1.0), cls(1e3), cls(0.0))


def _selection(parts: tuple[Part, ...]) -> Selection:
    rows = [
        Row(part.place, part.start, part.stop, part.numel, limit=bits_of(part.codec.threshold))
        for part in parts
    ]
    return Selection("reaching", tuple(rows))
