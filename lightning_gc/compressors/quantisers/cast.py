"""Cast: send each element as a 16-bit float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import (
    Codec,
    CodecScheme,
    Contraction,
    JointCodec,
    Part,
    Shards,
    Traits,
)
from lightning_gc.core import Bucket, Choice, Field, Payload, Wire
from lightning_gc.kernels.dispatch import compiled, family, fused
from lightning_gc.kernels.quantise import add_bfloat16, round_to_bfloat16

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _kernels(tensor: Tensor) -> Any:
    return family("casts", tensor)


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
            raise ValueError(f"Cast(dtype={self.dtype!r}): use 'bfloat16' or 'float16'.")
        object.__setattr__(self, "dtype", name)

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        joint = "no" if scheme is None else scheme.joint(bucket.workers)
        if joint == "parts" and fused(buffer, "casts"):
            return True
        return joint != "no" and self.dtype == "bfloat16" and compiled(buffer, "casts")

    def in_shards(self, bucket: Bucket, buffer: Tensor) -> Shards | None:
        if bucket.pending is None:
            return None
        from lightning_gc.kernels.host import casts

        row = JointCodec((Part(self, "shard", 0, -(-bucket.numel // bucket.workers), 0),))
        table = casts.shards(bucket.pending.segments, bucket.numel, bucket.workers)
        return Shards(row, bucket.numel, table, bucket, buffer)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if bucket.pending is not None:
            payload: Payload = _kernels(buffer).encode(buffer, _TYPES[self.dtype], bucket.pending)
            return payload
        if self.dtype == "bfloat16":
            return (round_to_bfloat16(buffer),)
        largest = torch.finfo(torch.float16).max
        values = buffer.clamp(-largest, largest).to(torch.float16)
        buffer.sub_(values)
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        add_bfloat16(out, payload[0], scale)

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        if bucket.pending is None:
            super().receive_all(payloads, out, bucket, averaged=averaged)
            return
        self.check(payloads, bucket, averaged=averaged)
        _kernels(out).average([values for (values,) in payloads], out, bucket.pending)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − 2⁻¹⁶ for bfloat16; 0 for float16, which may round all to zero."""
        return Contraction(1 - 2**-16 if self.dtype == "bfloat16" else 0.0)

    def wire(self, numel: int) -> Wire:
        return (Field("values", _TYPES[self.dtype], numel),)

    @classmethod
    def examples(cls) -> tuple[Cast, ...]:
        return (cls("bfloat16"), cls("float16"))
