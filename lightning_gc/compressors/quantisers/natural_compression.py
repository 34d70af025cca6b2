"""NaturalCompression: send signs and exponents, rounded at random so that it is unbiased."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Traits, Variance
from lightning_gc.core import Bucket, Field, Payload, Wire
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack

_MANTISSA, _LARGEST = 23, 254  # bits of float32's mantissa; the exponent of its largest numbers


@dataclass(frozen=True)
class NaturalCompression(Codec):
    """Round each element at random to one of the two powers of two around it.

    ``C(x) = sign(x)·2^⌊log₂|x|⌋`` with probability ``(2^⌈log₂|x|⌉ − |x|) / 2^⌊log₂|x|⌋``, else
    ``sign(x)·2^⌈log₂|x|⌉``, so that ``E C(x) = x``. This is float32 without its mantissa, 9 bits an
    element; the paper's own code cuts exponents to a smaller range and spends 8. Below 2⁻¹²⁶ an
    element becomes that or zero; 2¹²⁷ and more becomes 2¹²⁷, since float32 has no 2¹²⁸.

    Unbiased, so without error feedback by default; surveys list it with ``memory=ErrorFeedback()``.

    Example:
        >>> from lightning_gc import NaturalCompression
        >>> NaturalCompression().bound(1000)
        Variance(omega=0.125)

    Reference:
        Horváth, Ho, Horváth, Sahu, Canini and Richtárik, "Natural Compression for Distributed
        Deep Learning", MSML 2022.
    """

    traits = Traits(kind="quantiser", unbiased=True)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        words = buffer.float().view(torch.int32)
        draw = bucket.generator(shared=False)
        noise = torch.randint(
            1 << _MANTISSA, words.shape, generator=draw, device=words.device, dtype=torch.int32
        )
        exponents = (words >> _MANTISSA) & 255
        up = noise < (words & ((1 << _MANTISSA) - 1))
        finite = exponents <= _LARGEST
        rounded = torch.where(finite, (exponents + up).clamp_(max=_LARGEST), exponents)
        negative = words < 0
        buffer.sub_(_powers(rounded, negative))
        return rounded.to(torch.uint8), pack(negative.to(torch.uint8), 1)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        exponents, packed = payload
        negative = unpack(packed, 1, out.numel(), torch.uint8).bool()
        out.add_(_powers(exponents.to(torch.int32), negative), alpha=scale)

    def bound(self, numel: int) -> Variance:
        """Return ω = 1/8, reached by elements in the middle between two powers."""
        return Variance(1 / 8)

    def wire(self, numel: int) -> Wire:
        return (
            Field("exponents", torch.uint8, numel, note="as in float32; 255: not finite"),
            Field("signs", torch.uint8, packed_bytes(numel, 1), note="bits, set where negative"),
        )


def _powers(exponents: Tensor, negative: Tensor) -> Tensor:
    """Return ``±2^(exponent − 127)``, ``(n,)`` float32; zero for exponent 0, infinity for 255."""
    magnitudes = (exponents << _MANTISSA).view(torch.float32)
    return torch.where(negative, -magnitudes, magnitudes)
