"""Float4: send each element as a 4-bit float, scaled block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_gc.compressors.quantisers import minifloat
from lightning_gc.compressors.quantisers.blockwise_codes import BLOCK_SIZES, BlockwiseCodes
from lightning_gc.compressors.traits import Contraction, Traits
from lightning_gc.core.search_space import Choice

# Bits of the mantissa, and the code of the largest number.
_FORMATS = {"e2m1": (1, 7), "e3m0": (0, 7)}


@dataclass(frozen=True)
class Float4(BlockwiseCodes):
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

    Raises:
        ValueError: an unknown ``format``, ``block_size`` below 1.

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
    coding = "sign, exponent, mantissa"
    numbers = ("scales",)
    traits = Traits(kind="quantiser", space=(Choice("format", ("e2m1", "e3m0")), BLOCK_SIZES))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in _FORMATS:
            known = ", ".join(map(repr, _FORMATS))
            raise ValueError(f"Float4(format={self.format!r}): formats are {known}; use 'e2m1'.")

    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        largest = blocks.abs().amax(dim=1).float()  # (b,)
        shares = blocks / largest.where(largest > 0, 1.0).view(-1, 1)
        return minifloat.nearest(shares, *_FORMATS[self.format], sign=8), largest

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        table = minifloat.table(*_FORMATS[self.format], 8, device=codes.device)
        found = table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return found.mul_(numbers[0].view(-1, 1))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − max(ρ², n / (4·T² + n)), for n = min(block_size, numel) − 1.

        ρ is 1/5 with a bit of mantissa and 1/3 without, T is 12 and 64 in units of the smallest
        number above zero; see ``minifloat.kept``.
        """
        others = min(self.block_size, max(1, numel)) - 1
        return Contraction(minifloat.kept(*_FORMATS[self.format], others))

    @classmethod
    def examples(cls) -> tuple[Float4, ...]:
        return (cls(), cls("e3m0", 7))
