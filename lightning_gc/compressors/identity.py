"""Identity: send gradients uncompressed, by the code path of every compressor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits
from lightning_gc.core import Bucket, Field, Payload, Wire


@dataclass(frozen=True)
class Identity(Codec):
    """Send the gradient uncompressed: ``C(x) = x``. Equals plain DDP.

    Under ``AllReduce``, the default, the gradient is reduced in place, without a copy or state.

    Example:
        >>> from lightning_gc import Identity
        >>> Identity()
        Identity()
    """

    traits = Traits(kind="dense", linear=True, unbiased=True, elementwise=True, exact=True)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        values = buffer.clone()
        buffer.zero_()
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        out.add_(payload[0], alpha=scale)

    def bound(self, numel: int) -> Contraction:
        """Return ``‖x − C(x)‖ = 0``."""
        return Contraction(1.0)

    def wire(self, numel: int) -> Wire:
        """Return all values, in the gradient's dtype."""
        return (Field("values", torch.float32, numel),)
