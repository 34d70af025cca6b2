"""IndependentTernGrad: −1, 0 or 1 for each element, drawn at random; a scale for each worker."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import Multiple, Variance
from lightning_gc.compressors.quantisers import integer_sums, terngrad
from lightning_gc.compressors.traits import Traits
from lightning_gc.core import payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.wire import Field, Wire


@dataclass(frozen=True)
class IndependentTernGrad(Codec):
    """Send −1, 0 or 1 for each element, drawn by its magnitude, and each worker's own scale.

    With ``y = min(max(x, −c·σ), c·σ)``, ``σ = √(mean x²)`` and ``s = ‖y‖_∞``:
    ``C(x)_i = s·sign(y_i)·b_i`` where ``P(b_i = 1) = |y_i| / s``, so that ``E C(x) = y``. What is
    clipped away is dropped. ``TernGrad`` has one scale for all workers, as the paper's "scaler
    sharing"; here each has its own, as in the paper's formula and in surveys: a worker with small
    elements sends as many as others. Sums of different scales are no small whole numbers, so every
    worker gets all payloads, or under ``TwoShot`` the mean is rounded again.

    Args:
        clip: c, at how many standard deviations elements are clipped, above 0. Lower means less
            variance, more bias. None, the survey's form, does not clip, and then it is unbiased.

    Five elements share a byte, so one takes 1.6 bits.

    Raises:
        ValueError: ``clip`` not above 0.

    Example:
        >>> import torch
        >>> from lightning_gc import IndependentTernGrad
        >>> from lightning_gc.testing import Lockstep
        >>> two = [{"w": torch.tensor([2.0, 0.0, -2.0])}, {"w": torch.tensor([0.0, 0.5, -0.5])}]
        >>> Lockstep(2, IndependentTernGrad(clip=None)).step(two).mean["w"]
        tensor([ 1.0000,  0.2500, -1.2500])

    Reference:
        Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad: Ternary Gradients to Reduce Communication
        in Distributed Deep Learning", NeurIPS 2017.
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        terngrad.check_clip("IndependentTernGrad", self.clip)

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(
            kind="quantiser",
            unbiased=self.clip is None,
            default_memory="none",
            space=(terngrad.CLIPS,),
        )

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        scale = integer_sums.largest(buffer)  # (1,) float32
        if self.clip is not None:
            scale = torch.minimum(scale, self.clip * terngrad.deviation(buffer, scale))
        draw = bucket.generator(shared=False)
        # float64 has fractions small enough for elements that are a millionth of the scale.
        noise = torch.rand(
            buffer.shape, generator=draw, device=buffer.device, dtype=torch.float64
        ).mul_(scale)
        sent = torch.where(noise < buffer.abs(), buffer.sign(), 0.0)
        # Elements that are not finite make the scale so, with which all are.
        buffer.sub_(sent * scale)
        return pack(sent.nan_to_num(0.0).add_(1).to(torch.uint8)), scale

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        packed, own = payload
        signs, own = unpack(packed, out.numel(), own)
        out.add_(signs.to(out.dtype).sub_(1).mul_(own), alpha=scale)

    def bound(self, numel: int) -> Variance | Multiple:
        """Return that of ``TernGrad`` for one worker."""
        return terngrad.bound(self.clip, numel)

    def wire(self, numel: int) -> Wire:
        note = "0 to 2 for −1 to 1; five to a byte"
        codes = Field("codes", torch.uint8, packed_bytes(numel), note=note)
        return codes, Field("scale", torch.float32, 1)

    @classmethod
    def examples(cls) -> tuple[IndependentTernGrad, ...]:
        return (cls(), cls(clip=None), cls(clip=0.5))


PER_BYTE = 5  # 3^5 = 243
_HIGHEST = 3**PER_BYTE - 1


def packed_bytes(numel: int) -> int:
    """Return the length in bytes of ``numel`` trits."""
    return -(-numel // PER_BYTE)


def pack(trits: Tensor) -> Tensor:
    """Return ``(packed_bytes(n),)`` uint8 for trits, ``(n,)`` uint8; the last are filled up by 0.

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
        numel: how many.
        scales: factors of what trits stand for, a floating dtype.

    Raises:
        ValueError: on the host, a byte above 242. Elsewhere the scales become NaN.
    """
    scales = payload_validation.codes(data, _HIGHEST, scales)
    rest, digits = data.clone(), []
    for _ in range(PER_BYTE):
        digits.append(rest.remainder(3))
        rest = rest.div_(3, rounding_mode="floor")
    return torch.stack(digits, dim=1).view(-1)[:numel], scales
