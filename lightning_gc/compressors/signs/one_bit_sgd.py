"""OneBitSGD: send one bit per element, and one mean for each of its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Traits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.core import Bucket, Field, Payload, Wire


@dataclass(frozen=True)
class OneBitSGD(sign_payload.TwoLevels):
    """Send one bit an element, and the means of the negative and of the other elements.

    ``C(x)_i = mean{x_j : x_j ≥ 0}`` if ``x_i ≥ 0``, else ``mean{x_j : x_j < 0}``. The paper has two
    means for each column of a matrix, this two for each tensor. 1 bit an element and 8 bytes.

    Example:
        >>> import torch
        >>> from lightning_gc import OneBitSGD
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, OneBitSGD()).step([{"w": torch.tensor([3.0, 1.0, -4.0])}]).mean["w"]
        tensor([ 2.,  2., -4.])

    Reference:
        Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its Application to
        Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
    """

    traits = Traits(kind="quantiser")
    levels = "means"

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        negative = (buffer < 0).sum()
        below = sign_payload.mean(buffer.clamp(max=0), negative)
        above = sign_payload.mean(buffer.clamp(min=0), buffer.numel() - negative)
        means = torch.stack([below, above])
        return sign_payload.take(buffer, means), means

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        bits, means = payload
        sign_payload.add(bits, means, out, scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1/d: at least the share of the greatest element is taken; usually far more."""
        return Contraction(1 / max(1, numel))

    def wire(self, numel: int) -> Wire:
        means = Field("means", torch.float32, 2, note="of negative elements, of the others")
        return (sign_payload.field(numel), means)
