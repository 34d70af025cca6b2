"""Send the sign of each element and one scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits
from lightning_gc.core import Bucket, Field, Payload, Wire
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack


@dataclass(frozen=True)
class ScaledSign(Codec):
    """Send ``mean|x| * sign(x)``: the new file of ``test_new_compressor.py``.

    Example:
        >>> from lightning_gc import ScaledSign
        >>> ScaledSign()
        ScaledSign()
    """

    traits = Traits("quantiser")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the scaled signs."""
        scale = buffer.abs().mean().reshape(1)
        negative = buffer < 0
        buffer.sub_(scale.where(~negative, -scale))
        return pack(negative.int(), 1), scale

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add the scaled signs."""
        packed, size = payload
        out.add_((1 - 2 * unpack(packed, 1, out.numel())) * size, alpha=scale)

    def bound(self, numel: int) -> Contraction:
        """Return 1 / numel, reached by one large element."""
        return Contraction(1 / max(numel, 1))

    def wire(self, numel: int) -> Wire:
        """Return a bit an element, and the scale."""
        bits = Field("signs", torch.uint8, packed_bytes(numel, 1), note="a bit each")
        return bits, Field("scale", torch.float32, 1)
