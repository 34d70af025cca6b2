"""Float4: send each element as a 4-bit float, scaled block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_gc.compressors.base import Traits
from lightning_gc.compressors.quantisers.blockwise_codes import BLOCK_SIZES
from lightning_gc.compressors.quantisers.minifloat import Minifloat
from lightning_gc.core import Choice


@dataclass(frozen=True)
class Float4(Minifloat):
    """Round each element to the nearest number of a 4-bit format in which its block fits.

    ``C(x)_i = L/T · nearest(T·x_i / L)``, where L is the largest magnitude of the block and T the
    largest number of the format. Ties go to the even code with ``"e2m1"``; with ``"e3m0"`` to the
    larger number, and half the smallest one to 0.

    Args:
        format: ``"e2m1"`` has T = 6 and the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6: 2 bits of exponent,
            1 of mantissa. ``"e3m0"`` has powers of two alone, from T/64 to T, and 0. The first is
            the more exact near L, at most 1/5 off; the second still has numbers for elements 64
            times as small as L, at most 1/3 off.
        block_size: elements that share one scale. Smaller means fewer zeros and more scales.

    In blocks of 64 an element takes 4.5 bits, in blocks of 512 4.06.

    Example:
        >>> import torch
        >>> from lightning_gc import Float4
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, Float4()).step([{"w": torch.tensor([6.0, -2.4, 0.1])}]).mean["w"]
        tensor([ 6., -2.,  0.])

    Reference:
        Rouhani et al., "Microscaling Data Formats for Deep Learning", 2023 (E2M1; there with scales
        that are powers of two for 32 elements).
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (E3M0, of what
        many steps have changed; in our reading with zero and with a scale for each block).
    """

    format: Literal["e2m1", "e3m0"] = "e2m1"
    block_size: int = 64

    bits = 4
    formats: ClassVar = {"e2m1": (1, 7, 1), "e3m0": (0, 7, 2)}
    traits = Traits(kind="quantiser", space=(Choice("format", ("e2m1", "e3m0")), BLOCK_SIZES))

    @classmethod
    def examples(cls) -> tuple[Float4, ...]:
        return (cls(), cls("e3m0", 7))
