"""No compression, through the same path as everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.compressors.base import Codec, Contraction, dense
from lightning_gc.flow import Flow, Payload

if TYPE_CHECKING:
    from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class Identity(Codec):
    """Send the gradient as it is: ``C(x) = x``. Equals plain DDP.

    Under ``AllReduce``, its default, the gradient is reduced in place: no copy, no error state.

    Wire format:
        ``values  # (numel,)`` in the gradient's dtype: 32 bits an element for float32.

    Example:
        >>> from lightning_gc import Identity
        >>> Identity()
        Identity()
    """

    kind = "dense"
    linear = True
    unbiased = True
    elementwise = True
    exact = True

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take everything."""
        values = buffer.clone()
        buffer.zero_()
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add everything."""
        payload_validation.lengths(payload, out.numel())
        (values,) = payload
        out.add_(values, alpha=scale)

    def bound(self, numel: int) -> Contraction:
        """Return ``‖x − C(x)‖ = 0``."""
        return Contraction(1.0)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Reduce in place where payloads are averaged anyway; else as any other codec."""
        if scheme.averages:
            yield from dense(buffer, out)
        else:
            yield from scheme.flow(self, bucket, buffer, out)
