"""Send which elements are the most positive and the most negative, and the mean of either."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Codec, Contraction, Knob
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import sparse_payload, sparse_sign_payload, topk_selection
from lightning_gc.flow import Limits, Payload
from lightning_gc.search_space import Range

_LEAST = 2 / 3  # of the wanted share of a side, that rounding leaves: one element of 1.5


@dataclass(frozen=True)
class FixedProportion(Codec):
    """Send a fixed share of the positive and of the negative elements, each as its side's mean.

    ``C(x)_i = mean{x_j : j in P}`` for i in P, the ``density·n₊`` greatest of n₊ positive elements;
    likewise for the least of the negative ones; else 0. The two thresholds that
    this means are found exactly, not by a sample. It is ``OneBitSGD`` of the elements that matter.

    Args:
        density: share of either side sent, in (0, 1]; at least one element of a side that is not
            empty. Lower means more compression, more error.

    Wire format:
        Ragged; c depends on how many elements are positive, negative and zero.
        ``means      # (2,) float32``: of the negative elements sent, of the positive ones
        ``positions  # (coded_bytes(c, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/c)`` bits each and a byte or two
        ``signs      # (floor(c / 8),) uint8``, eight elements a byte
        ``last       # (c mod 8,) uint8``, the last signs, one a byte, whose number tells c
        At density 1 % that makes 9.6 bits a sent element.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> import torch
        >>> from lightning_gc import FixedProportion
        >>> from lightning_gc.testing import Lockstep
        >>> gradient = {"w": torch.tensor([3.0, 5.0, 1.0, 2.0, -4.0, -1.0])}
        >>> Lockstep(1, FixedProportion(0.5)).step([gradient]).mean["w"]
        tensor([ 4.,  4.,  0.,  0., -4.,  0.])

    Reference:
        Dryden, Moon, Jacobs and Van Essen, "Communication Quantization for Data-Parallel Training
        of Deep Neural Networks", MLHPC 2016.
    """

    density: float = 0.01

    kind = "sparsifier"
    ragged = True
    knob = Knob("density", low=1e-5, high=1.0)
    space = (Range("density", 1e-4, 0.1, scale="log"),)

    def __post_init__(self) -> None:
        sparse_payload.check_density("FixedProportion", self.density)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the mean of either side's greatest. On CUDA the host waits for their number."""
        # What is not a number counts as positive, so that it is in one of them, and only in one.
        below = self._greatest(torch.where(buffer < 0, buffer, 0))
        above = self._greatest(torch.where(buffer < 0, 0, buffer))
        means = torch.stack(
            [sign_payload.mean(buffer[side], side.numel()) for side in (below, above)]
        )
        return means, *sparse_sign_payload.take(
            buffer, torch.cat([below, above]).sort().values, means
        )

    def _greatest(self, side: Tensor) -> Tensor:
        """Return the ascending positions of the share to send of what is not zero."""
        return topk_selection.largest(
            side, sparse_payload.count(self.density, int(side.count_nonzero()))
        )

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add the mean of each element's side."""
        sparse_sign_payload.check(payload, out.numel(), 2, most=self._most(out.numel()))
        sparse_sign_payload.add(payload[1:], payload[0], out, scale)

    def _most(self, numel: int) -> int:
        """Return how many are sent at most: two sides may round up where the whole would not."""
        return min(numel, sparse_payload.count(self.density, numel) + 1)

    def bound(self, numel: int) -> Contraction:
        """Return δ = min(1/k, ⅔·density), for k = density·numel.

        Of a side of n elements the k greatest, whose sum is A, take A²/k out of the side's squared
        norm. That norm is greatest where one has A and the others nothing, A², or where all have
        A/k, n·A²/k²; so they take 1/k of it or k/n. Of the share k/n rounding leaves ⅔ at least.
        """
        return Contraction(
            min(1 / max(1, sparse_payload.count(self.density, numel)), _LEAST * self.density)
        )

    def limits(self, numel: int) -> Limits:
        """The share of both sides at most."""
        return None, *sparse_sign_payload.limits(self._most(numel), numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many of both sides were sent."""
        return sparse_sign_payload.count(payload)

    @classmethod
    def examples(cls) -> tuple[FixedProportion, ...]:
        """A sparse and a dense one."""
        return (cls(0.1), cls(1.0))
