"""FixedProportion: send the greatest elements of each sign as one mean per sign."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Waits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket, Field, Payload, Wire

_LEAST = 2 / 3  # of the wanted share of a side, that rounding leaves: one element of 1.5


@dataclass(frozen=True)
class FixedProportion(DensitySparsifier, Codec):
    """Send a fixed share of the positive and of the negative elements, each as its side's mean.

    ``C(x)_i = mean{x_j : j in P}`` for i in P, the ``density·n₊`` greatest of n₊ positive elements,
    and also for the least of the negative ones; else 0. Both thresholds are exact. At density 1 % a
    sent element takes 9.6 bits.

    Args:
        density: share of either side sent, in (0, 1]; at least one element of a side that is not
            empty. Lower means more compression, more error.

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

    waits = Waits(1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Subtract a side's mean from chosen elements. On CUDA the host waits for their number."""
        # NaN counts as positive, so that it is on exactly one side.
        sides = [torch.where(buffer < 0, buffer, 0), torch.where(buffer < 0, 0, buffer)]
        numbers = torch.stack([side.count_nonzero() for side in sides]).tolist()
        below, above = map(self._greatest, sides, numbers)
        means = torch.stack([sign_payload.mean(buffer[i], i.numel()) for i in (below, above)])
        chosen = torch.cat([below, above]).sort().values
        return means, *sign_payload.take_chosen(buffer, chosen, means)

    def _greatest(self, side: Tensor, number: int) -> Tensor:
        """Return the ascending positions of the share to send of ``number`` that are not zero."""
        return topk_selection.largest(side, self.count(number))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        sign_payload.add_chosen(payload[1:], payload[0], out, scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = min(1/k, ⅔·density), for k = density·numel.

        On a side of n elements, let A be the sum of the k greatest. Sending them takes A²/k out of
        the side's squared norm. That norm is greatest where one has A and the others nothing, A²,
        or where all have A/k, n·A²/k²; so they take 1/k of it or k/n. Rounding leaves at least ⅔ of
        the share k/n.
        """
        k = max(1, self.count(numel))
        return Contraction(min(1 / k, _LEAST * self.density))

    def wire(self, numel: int) -> Wire:
        # Two sides may round up where the whole would not.
        most = min(numel, self.count(numel) + 1)
        means = Field("means", torch.float32, 2, note="of negative, of positive elements sent")
        return (means, *sign_payload.chosen_fields(most, numel))

    def sent(self, payload: Payload, numel: int) -> int:
        return sign_payload.count(payload)
