"""NVFP4: send each element as a 4-bit float, with an 8-bit scale for 16 elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_gc.compressors.base import Traits
from lightning_gc.compressors.quantisers.minifloat import Minifloat
from lightning_gc.core import Bucket, Field, Payload, Wire

_LARGEST = 448 * 6  # of a scale in e4m3 times an element in e2m1


@dataclass(frozen=True)
class NVFP4(Minifloat):
    """Round each element to NVFP4, the 4-bit float of least error, if errors are fed back.

    ``C(x)_i = g·s·nearest(x_i / (g·s))``, ``s = e4m3(L / 6g)``, where L is the largest magnitude of
    a block of 16 elements, and s takes 8 bits. The format has 0, 0.5, 1, 1.5, 2, 3, 4, 6. g is the
    least power of two with which no scale exceeds 448. Ties go to the even code. An element takes
    4.5 bits.

    NVIDIA's g is the tensor's largest magnitude over 2,688. A power of two also fits the format,
    and divides without rounding, so that the error is exact.

    At the same number of bits it leaves less error than ``Float4()``. Elements in blocks below
    about a millionth of the tensor's largest element become zero.

    Example:
        >>> import torch
        >>> from lightning_gc import NVFP4
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, NVFP4()).step([{"w": torch.tensor([6.0, -2.4, 0.1])}]).mean["w"]
        tensor([ 6., -2.,  0.])

    Reference:
        NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
    """

    format = "e2m1"
    bits = 4
    block_size = 16
    scaling = "e4m3"
    formats: ClassVar = {"e2m1": (1, 7, 1)}
    traits = Traits(kind="quantiser")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        unit = torch.ones_like(buffer[:1], dtype=torch.float32)
        if buffer.numel():
            # The tensor's scale is a power of two, so that division by it is exact.
            exponent = torch.frexp(buffer.abs().amax().float() / _LARGEST).exponent
            unit = torch.ldexp(unit, exponent.clamp(min=-126))
        payload = super().encode(buffer.div_(unit), bucket)
        buffer.mul_(unit)
        return *payload, unit

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        *blocks, unit = payload
        found = torch.zeros_like(out)
        super().decode(tuple(blocks), found, 1.0, bucket)
        out.add_(found.mul_(unit), alpha=scale)

    def wire(self, numel: int) -> Wire:
        return *super().wire(numel), Field("scale", torch.float32, min(1, numel))
