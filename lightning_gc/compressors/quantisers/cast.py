"""Cast: send each element as a 16-bit float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits
from lightning_gc.compressors.joint import (
    CodecScheme,
    JointCodec,
    Part,
    Shards,
    WholeCodec,
    joint_of,
)
from lightning_gc.core import Bucket, Choice, Field, Payload, Wire
from lightning_gc.core.refusal import refuse
from lightning_gc.kernels.dispatch import compiled, family, fused
from lightning_gc.kernels.quantise import add_bfloat16, round_to_bfloat16

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

    Raises:
        ValueError: another ``dtype``.

    Example:
        >>> from lightning_gc import Cast
        >>> Cast("float16")
        Cast(dtype='float16')
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    traits = Traits(
        kind="quantiser", elementwise=True, space=(Choice("dtype", ("bfloat16", "float16")),)
    )

    def __post_init__(self) -> None:
        # Many will pass a torch.dtype; YAML, hparams and repr can only hold a string.
        name = str(self.dtype).removeprefix("torch.")
        if name not in _TYPES:
            refuse("Cast", "use 'bfloat16' or 'float16'", dtype=self.dtype)
        object.__setattr__(self, "dtype", name)

    @property
    def whole(self) -> WholeCodec:
        return _WholeCast(self)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if self.dtype == "bfloat16":
            return (round_to_bfloat16(buffer),)
        largest = torch.finfo(torch.float16).max
        values = buffer.clamp(-largest, largest).to(torch.float16)
        buffer.sub_(values)
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        add_bfloat16(out, payload[0], scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − 2⁻¹⁶ for bfloat16; 0 for float16, which may round all to zero."""
        return Contraction(1 - 2**-16 if self.dtype == "bfloat16" else 0.0)

    def wire(self, numel: int) -> Wire:
        return (Field("values", _TYPES[self.dtype], numel),)

    @classmethod
    def examples(cls) -> tuple[Cast, ...]:
        return (cls("bfloat16"), cls("float16"))


class _WholeCast(WholeCodec):
    """Casts a bucket for the engine. Its parameters do not matter: elements are independent."""

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        joint = joint_of(bucket, scheme)
        if joint == "parts" and fused(buffer, "casts"):
            return True
        return joint != "no" and self.codec.dtype == "bfloat16" and compiled(buffer, "casts")

    def in_shards(self, bucket: Bucket, buffer: Tensor) -> Shards | None:
        if bucket.pending is None:
            return None
        from lightning_gc.kernels.host import casts

        part = Part(self.codec, "shard", 0, -(-bucket.numel // bucket.workers), 0)
        table = casts.shards(bucket.pending.segments, bucket.numel, bucket.workers)
        return Shards(JointCodec(self.codec, (part,)), bucket.numel, table, bucket, buffer)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if bucket.pending is None:
            return super().encode(buffer, bucket)
        kernels, dtype = family("casts", buffer), _TYPES[self.codec.dtype]
        payload: Payload = kernels.encode(buffer, dtype, bucket.pending)
        return payload

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        if bucket.pending is None:
            super().receive_all(payloads, out, bucket, averaged=averaged)
            return
        self.check(payloads, bucket, averaged=averaged)
        values = [payload[0] for payload in payloads]
        family("casts", out).average(values, out, bucket.pending)
