"""TernGrad: send −1, 0 or 1 for each element, drawn at random, and a scale."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Codec, Collective, Compressor, Multiple, Traits, Variance
from lightning_gc.compressors.quantisers import integer_sums
from lightning_gc.compressors.wrappers.wrapper import Preset
from lightning_gc.core import Bucket, Choice, Field, Flow, Payload, Wire, payload_validation
from lightning_gc.core.registry import given_fields

_BITS = 2  # of a ternary code


@dataclass(frozen=True)
class _Ternary(Compressor):
    """Round the clipped element y to ``S·sign(y)`` with probability ``|y| / S``, else to zero."""

    clip: float | None = 2.5
    limits = {
        "clip": "(0, inf) a number of standard deviations; the paper's 2.5, or None not to clip",
    }

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(
            kind="quantiser",
            unbiased=self.clip is None,
            default_memory="none",
            space=(Choice("clip", (1.5, 2.0, 2.5, 3.0, 4.0, None)),),
        )

    def largest(self, buffer: Tensor) -> Tensor:
        """Return the largest clipped magnitude, ``(1,)`` float32."""
        largest = integer_sums.largest(buffer)
        if self.clip is None:
            return largest
        # 1e-30 and 1e30 squared leave float32's range; x / max squared does not.
        unit = buffer / largest.where(largest > 0, 1.0)
        length: Tensor = torch.linalg.vector_norm(unit) / math.sqrt(max(1, buffer.numel()))
        return torch.minimum(largest, self.clip * (largest * length).float())

    def bound(self, numel: int) -> Variance | Multiple:
        """Return ω = (√d − 1)/2 unclipped, and 1 + c²/8 (c − 1 from c = 4 on) where it clips.

        Both hold for one worker, with its own scale. The first also holds for the gradients of W
        workers taken as one tensor of W·d elements.

        Where it clips: with S = 1 the error is ``Σ x² + Σ |y|·(1 − 2·|x|)``. If an element is
        clipped, then S = c·σ and ``‖x‖² = d/c²``. A term of the second sum is at most 1/8, at
        |x| = 1/4, which makes ``1 + c²/8``. It is also at most a concave function of x²,
        ``|x| − 2·x²`` up to there and 1/8 beyond. So for c ≥ 4 the sum is at most as for d elements
        |x| = 1/c, which makes ``c − 1``. If no element is clipped, the error is ``Σ|x| − Σx²`` with
        ``mean x² ≥ 1/c²``: again c − 1 at most, never above ``1 + c²/8``. And c ≥ √d clips nothing,
        since no element is above ``√d·σ``.
        """
        unclipped = integer_sums.variance(numel, _BITS)
        if self.clip is None:
            return Variance(unclipped)
        if self.clip**2 >= numel:
            return Multiple(unclipped)
        return Multiple(1 + self.clip**2 / 8 if self.clip < 4 else self.clip - 1)


@dataclass(frozen=True)
class _TernGrad(_Ternary, Collective):
    """``TernGrad`` with one scale for all workers, so that their codes add up as integers."""

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        own = self.largest(buffer)
        excess = None
        if self.clip is not None:
            clipped = buffer.clamp(-own, own)
            excess = buffer - clipped
            buffer.copy_(clipped)
        scale = yield from integer_sums.agreed(own)
        payloads = integer_sums.take(buffer, scale, _BITS, bucket)
        if excess is not None:
            buffer.add_(excess)
        yield from integer_sums.add(self, payloads, scale, _BITS, bucket, out)

    def wire(self, numel: int) -> Wire:
        return integer_sums.wire("scale", numel, _BITS)

    def __repr__(self) -> str:
        return f"TernGrad(clip={self.clip!r})"


@dataclass(frozen=True)
class _OwnScales(_Ternary, Codec):
    """``TernGrad`` with each worker's own scale; five elements share a byte."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        scale = self.largest(buffer)  # (1,) float32
        draw = bucket.generator(shared=False)
        # float64 has fractions small enough for elements that are a millionth of the scale.
        noise = torch.rand(
            buffer.shape, generator=draw, device=buffer.device, dtype=torch.float64
        ).mul_(scale)
        sent = torch.where(noise < buffer.abs(), buffer.sign(), 0.0)
        # A non-finite element makes the scale non-finite, and so the whole result.
        buffer.sub_(sent * scale)
        return pack(sent.nan_to_num(0.0).add_(1).to(torch.uint8)), scale

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        packed, own = payload
        signs, own = unpack(packed, out.numel(), own)
        out.add_(signs.to(out.dtype).sub_(1).mul_(own), alpha=scale)

    def wire(self, numel: int) -> Wire:
        note = "0 to 2 for −1 to 1; five to a byte"
        codes = Field("codes", torch.uint8, packed_bytes(numel), note=note)
        return codes, Field("scale", torch.float32, 1)

    def __repr__(self) -> str:
        return f"TernGrad(clip={self.clip!r}, shared=False)"


@dataclass(frozen=True, repr=False)
class TernGrad(Preset):
    """Send the sign of an element with a probability proportional to its magnitude, else zero.

    With ``y = min(max(x, −c·σ), c·σ)`` on each worker, ``σ = √(mean x²)`` and the scale
    ``S = max_w ‖y_w‖_∞`` of all workers: ``C(x)_i = S·sign(y_i)·b_i`` where ``P(b_i = 1) =
    |y_i| / S``, so that ``E C(x) = y``. The clipped part and the error are dropped: the paper has
    no error feedback. Without clipping this is ``IntegerQSGD(bits=2)``.

    One scale for all workers is the paper's "scaler sharing". In its formula and in surveys, each
    worker has its own scale ``S = ‖x‖_∞``. Sums of codes are then not exact, so ``shared=False``
    has other rounds: every worker gets all payloads, or under ``TwoShot`` the mean is rounded
    again. Five elements share a byte, so an element takes 1.6 bits.

    σ is taken about zero, as in the paper's analysis. About the mean, as in the paper's code, a
    constant tensor would be clipped to zero.

    Args:
        clip: c, at how many standard deviations elements are clipped, above 0. Lower means less
            variance, more bias. None does not clip, and is unbiased.
        shared: whether all workers have one scale.

    Communication pattern:
        Three rounds, as for ``IntegerQSGD``, with the scale instead of the norm. Per worker
        ``(2 + ⌈log2(2·W + 1)⌉)·(W−1)/W`` bits an element: 2 + 5 for 8 workers. With
        ``shared=False``, one round under a scheme.

    Example:
        >>> from lightning_gc import TernGrad
        >>> TernGrad().traits.unbiased, TernGrad(clip=None).traits.unbiased
        (False, True)

    Reference:
        Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad: Ternary Gradients to Reduce Communication
        in Distributed Deep Learning", NeurIPS 2017.
    """

    clip: float | None = 2.5
    shared: bool = True
    limits = _Ternary.limits

    memory_name = "none"

    @functools.cached_property
    def inner(self) -> _TernGrad | _OwnScales:
        return _TernGrad(self.clip) if self.shared else _OwnScales(self.clip)

    def __repr__(self) -> str:
        """Leave out default fields but ``clip``."""
        fields = {"clip": self.clip, **given_fields(self)}
        return f"TernGrad({', '.join(f'{n}={v!r}' for n, v in fields.items())})"

    @classmethod
    def examples(cls) -> tuple[TernGrad, ...]:
        return (cls(), cls(clip=0.5), cls(clip=None), cls(shared=False))


PER_BYTE = 5  # 3^5 = 243
_HIGHEST = 3**PER_BYTE - 1


def packed_bytes(numel: int) -> int:
    """Return the length in bytes of ``numel`` trits."""
    return -(-numel // PER_BYTE)


def pack(trits: Tensor) -> Tensor:
    """Return ``(packed_bytes(n),)`` uint8 for trits, ``(n,)`` uint8; zeros fill the last byte.

    Example:
        >>> pack(torch.tensor([1, 2, 0, 0, 0, 2], dtype=torch.uint8))
        tensor([7, 2], dtype=torch.uint8)
    """
    digits = pad(trits, (0, -trits.numel() % PER_BYTE)).view(-1, PER_BYTE)
    packed = digits[:, -1].clone()
    for place in reversed(range(PER_BYTE - 1)):
        packed.mul_(3).add_(digits[:, place])
    return packed


def unpack(data: Tensor, numel: int, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return trits, ``(numel,)`` uint8, and ``scales`` if the bytes are valid.

    Args:
        data: ``(packed_bytes(numel),)`` uint8.
        numel: number of trits.
        scales: factors of the decoded trits, a floating dtype.

    Raises:
        ValueError: on the host, a byte above 242. On accelerators the scales become NaN instead.
    """
    scales = payload_validation.codes(data, _HIGHEST, scales)
    rest, digits = data.clone(), []
    for _ in range(PER_BYTE):
        digits.append(rest.remainder(3))
        rest = rest.div_(3, rounding_mode="floor")
    return torch.stack(digits, dim=1).view(-1)[:numel], scales
