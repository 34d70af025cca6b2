"""EFSignSGD: send signs times the mean magnitude, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Traits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.core import Bucket, Field, Payload, Wire


@dataclass(frozen=True)
class EFSignSGD(sign_payload.TwoLevels):
    """Send each element's sign times the mean magnitude of the tensor; keep the rest as the error.

    ``C(x) = ‖x‖₁/d · sign(x)``, with ``sign(0) = +1``. Unlike signs alone it converges as SGD does.
    1 bit an element and 4 bytes.

    Example:
        >>> import torch
        >>> from lightning_gc import EFSignSGD
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, EFSignSGD()).step([{"w": torch.tensor([3.0, -1.0])}]).mean["w"]
        tensor([ 2., -2.])

    Reference:
        Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", ICML 2019.
    """

    traits = Traits(kind="quantiser")
    levels = "magnitude"

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        scale = sign_payload.mean(buffer.abs(), buffer.numel())
        return sign_payload.take(buffer, torch.stack([-scale, scale])), scale.view(1)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        bits, magnitude = payload
        sign_payload.add(bits, torch.cat([-magnitude, magnitude]), out, scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1/d: ``‖x‖₁² / (d·‖x‖₂²)`` of a single large element; mostly it is more."""
        return Contraction(1 / max(1, numel))

    def wire(self, numel: int) -> Wire:
        return (sign_payload.field(numel), Field("scale", torch.float32, 1))
