"""Cast: send each element as a 16-bit float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits
from lightning_gc.compressors.joint import CodecScheme, WholeCodec, absorbed
from lightning_gc.core import Bucket, Choice, Field, Payload, Wire

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Round each element to the nearest 16-bit float: ``C(x) = float16(x)``.

    ``bfloat16`` keeps float32's range with 8 bits of precision: relative error at most 2⁻⁸.
    ``float16`` has 11 bits of precision between 6e-5 and 65,504; larger magnitudes are sent as
    65,504 and tiny ones less precisely. The difference stays in the error.

    It is not linear: averaging 16-bit numbers rounds at every addition, in nobody's error. The
    default scheme adds in float32, with the volume of a 16-bit ring all-reduce.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``.

    Example:
        >>> from lightning_gc import Cast
        >>> Cast("float16")
        Cast(dtype='float16')
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    traits = Traits(
        kind="quantiser", elementwise=True, space=(Choice("dtype", ("bfloat16", "float16")),)
    )

    @property
    def whole(self) -> WholeCodec:
        return _WholeCast(self)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if self.dtype == "bfloat16":
            values = buffer.to(torch.bfloat16)
        else:
            largest = torch.finfo(torch.float16).max
            values = buffer.clamp(-largest, largest).to(torch.float16)
        buffer.sub_(values)
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        out.add_(payload[0], alpha=scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − 2⁻¹⁶ for bfloat16; 0 for float16, which may round all to zero."""
        return Contraction(1 - 2**-16 if self.dtype == "bfloat16" else 0.0)

    def wire(self, numel: int) -> Wire:
        return (Field("values", _TYPES[self.dtype], numel),)

    @classmethod
    def examples(cls) -> tuple[Cast, ...]:
        return (cls("bfloat16"), cls("float16"))


class _WholeCast(WholeCodec):
    """Casts a bucket on a GPU. Its parameters do not matter: elements are independent."""

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        return absorbed(bucket, buffer, scheme, "casts")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if bucket.pending is None:
            return super().encode(buffer, bucket)
        from lightning_gc.kernels.gpu import casts

        return casts.encode(buffer, _TYPES[self.codec.dtype], bucket.pending)

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        if bucket.pending is None:
            super().receive_all(payloads, out, bucket, averaged=averaged)
            return
        from lightning_gc.kernels.gpu import casts

        self.check(payloads, bucket, averaged=averaged)
        casts.average([payload[0] for payload in payloads], out, bucket.pending)
