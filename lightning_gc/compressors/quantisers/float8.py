"""Float8: send each element as an 8-bit float, scaled block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_gc.compressors.base import Traits
from lightning_gc.compressors.quantisers.blockwise_codes import BLOCK_SIZES
from lightning_gc.compressors.quantisers.minifloat import Minifloat
from lightning_gc.core import Choice


@dataclass(frozen=True)
class Float8(Minifloat):
    """Round each element to the nearest number of an 8-bit format in which its block fits.

    ``C(x)_i = L/T · nearest(T·x_i / L)``, where L is the largest magnitude of the block and T the
    largest number of the format. Ties go to the even code.

    Args:
        format: ``"e4m3"`` and ``"e5m2"`` are torch's ``float8_e4m3fn`` and ``float8_e5m2``, bit for
            bit: 4 or 5 bits of exponent, 3 or 2 of mantissa. ``"1-3-4"`` has 3 bits of exponent, 4
            of mantissa, and no NaN. More mantissa means less relative error, at most 1/33 with 4
            bits, 1/17 with 3, 1/9 with 2; more exponent means that this holds for smaller elements:
            down to L/124, L/28,672, L/939,524,096. Far below that they become zero.
        block_size: elements that share one scale. Smaller means fewer zeros and more scales.

    In blocks of 512 an element takes 8.06 bits. The default is the format of today's hardware; what
    papers call Dettmers' 8-bit quantisation is ``"1-3-4"``.

    Example:
        >>> import torch
        >>> from lightning_gc import Float8
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, Float8()).step([{"w": torch.tensor([448.0, -100.0, 0.0])}]).mean["w"]
        tensor([448., -96.,   0.])

    Reference:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (e4m3 and e5m2). Dettmers, "8-Bit
        Approximations for Parallelism in Deep Learning", ICLR 2016 (1-3-4, in our reading with
        subnormal numbers as in IEEE 754; not that paper's dynamic tree).
    """

    format: Literal["e4m3", "e5m2", "1-3-4"] = "e4m3"
    block_size: int = 512

    bits = 8
    formats: ClassVar = {"e4m3": (3, 126, 9), "e5m2": (2, 123, 16), "1-3-4": (4, 127, 6)}
    traits = Traits(
        kind="quantiser", space=(Choice("format", ("e4m3", "e5m2", "1-3-4")), BLOCK_SIZES)
    )

    @classmethod
    def examples(cls) -> tuple[Float8, ...]:
        return (cls(), cls("e5m2", 7), cls("1-3-4", 64))
