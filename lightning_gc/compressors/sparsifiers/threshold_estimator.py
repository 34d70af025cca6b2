"""What methods share that guess a threshold for a wanted density from a few statistics."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Codec, Contraction, Knob
from lightning_gc.compressors.sparsifiers import sparse_payload, topk_selection
from lightning_gc.flow import Limits, Payload
from lightning_gc.search_space import Range

MOST = 2
"""How many times the wanted number of elements is sent at most."""


@dataclass(frozen=True)
class Estimating(Codec):
    """Sends what reaches a threshold that ``threshold`` estimates, and no more than 2·k elements.

    Methods differ in the estimate only. Where it is too low, the 2·k largest are sent; where it is
    too high, fewer are, perhaps none, and the others wait in the error. Zeros are never sent. On
    CUDA the host waits to know how many there are.

    Args:
        density: wanted share of elements, in (0, 1]. Lower means more compression, more error.

    Wire format:
        Ragged; c differs between workers and steps, and is at most 2·k.
        ``values     # (c,) float32``
        ``positions  # (coded_bytes(c, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/c)`` bits each and a byte or two.

    Raises:
        ValueError: ``density`` outside (0, 1].
    """

    density: float = 0.01

    kind = "sparsifier"
    ragged = True
    selects = True
    knob = Knob("density", low=1e-5, high=1.0)
    space = (Range("density", 1e-4, 0.1, scale="log"),)

    def __post_init__(self) -> None:
        sparse_payload.check_density(type(self).__name__, self.density)

    @abc.abstractmethod
    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        """Return the magnitude, 0-dim, that about k of ``magnitudes`` are thought to reach.

        Args:
            magnitudes: ``(numel,)``, the greatest of them 1.
            k: how many are wanted, fewer than there are.
        """

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take what reaches the threshold."""
        return self.take(buffer, self.choose(buffer, bucket))

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Find it."""
        k, lowest = (
            sparse_payload.count(self.density, buffer.numel()),
            topk_selection.smallest(buffer),
        )
        if k >= buffer.numel():
            return topk_selection.reaching(buffer, lowest)
        magnitudes = buffer.abs()
        largest = magnitudes.amax()
        # Squares of 1e30 and of 1e-30 are no numbers; of zeros nothing reaches the threshold.
        magnitudes.div_(largest.clamp_min(lowest))
        threshold = (self.threshold(magnitudes, k) * largest).clamp_min(lowest)
        found = topk_selection.reaching(buffer, threshold.to(buffer.dtype))
        return topk_selection.best(buffer, found, MOST * k)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add as many elements as came."""
        sparse_payload.put(payload, out, scale, most=self._most(out.numel()))

    def limits(self, numel: int) -> Limits:
        """2·k elements at most."""
        most = self._most(numel)
        return most, sparse_payload.most_index_bytes(most, numel)

    def _most(self, numel: int) -> int:
        return min(numel, MOST * sparse_payload.count(self.density, numel))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: an estimate may be so wrong that nothing is sent."""
        return Contraction(0.0)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """One that has something to send of a small tensor."""
        return (cls(0.1),)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many reached the threshold."""
        return payload[0].numel()


def reached(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    """Return how many magnitudes are not below the threshold, 0-dim."""
    return (magnitudes >= threshold).sum()
