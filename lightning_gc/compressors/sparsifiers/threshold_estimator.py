"""ThresholdEstimator: base of methods that estimate the threshold for a wanted density."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.density import DensitySparsifier
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.compressors.traits import Waits

MOST = 2  # times the wanted number of elements are sent at most


@dataclass(frozen=True)
class ThresholdEstimator(DensitySparsifier, SparseCodec):
    """Sends what reaches the threshold that ``threshold`` estimates, and no more than 2·k elements.

    If the estimate is too low, the 2·k largest are sent; if it is too high, fewer than k, perhaps
    none. Zeros are never sent. On CUDA the host waits for their number.
    """

    @property
    def waits(self) -> Waits:
        return Waits(1)

    @abc.abstractmethod
    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        """Return the magnitude, 0-dim, that about k of ``magnitudes`` should reach.

        Args:
            magnitudes: ``(numel,)``, the greatest of them 1.
            k: how many are wanted, fewer than there are.
        """

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        k = self.count(buffer.numel())
        lowest = topk_selection.smallest(buffer)
        if k >= buffer.numel():
            return topk_selection.reaching(buffer, lowest)
        magnitudes = buffer.abs()
        largest = magnitudes.amax()
        # Squares of 1e30 and of 1e-30 are no numbers; of zeros nothing reaches the threshold.
        magnitudes.div_(largest.clamp_min(lowest))
        threshold = (self.threshold(magnitudes, k) * largest).clamp_min(lowest)
        found = topk_selection.reaching(buffer, threshold.to(buffer.dtype))
        return topk_selection.best(buffer, found, MOST * k)

    def most(self, numel: int) -> int:
        return min(numel, MOST * self.count(numel))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: an estimate may be so wrong that nothing is sent."""
        return Contraction(0.0)


def reached(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    """Return how many magnitudes are not below the threshold, 0-dim."""
    return (magnitudes >= threshold).sum()
