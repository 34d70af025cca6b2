"""Minifloat: base class of quantisers to floats of few bits.

A format has m bits of mantissa, and T is the code of its largest number. A code without its sign is
``exponent · 2^m + fraction``, with subnormal numbers as in IEEE 754. It means an integer multiple
of the smallest number above zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction
from lightning_gc.compressors.quantisers.blockwise_codes import BlockwiseCodes, LookupTable
from lightning_gc.kernels.blocks import BlockCode, Book

_MANTISSA, _BIAS = 23, 127  # of float32
_ROUNDING = 1.0001  # factor by which float32's rounding, at most 2^−22, may raise squared errors


def number(code: int, mantissa: int) -> int:
    """Return the number of a code without its sign, in units of the smallest number above zero.

    Example:
        >>> [number(code, mantissa=1) for code in range(8)]  # E2M1, whose unit is 1/2
        [0, 1, 2, 3, 4, 6, 8, 12]
    """
    places = max(0, (code >> mantissa) - 1)
    return code - (places << mantissa) << places


def nearest(shares: Tensor, mantissa: int, top: int, sign: int) -> Tensor:
    """Return the codes, uint8, of the numbers nearest to ``shares`` times the largest number.

    Ties go to the even code.

    Args:
        shares: in [−1, 1], any shape.
        mantissa: m.
        top: T.
        sign: added to the codes of negative numbers.
    """
    # In units of the smallest number above zero, which make T a whole number.
    codes = _codes(shares.abs().float() * number(top, mantissa), mantissa, top)
    return codes.add_((shares < 0) * sign).to(torch.uint8)


def _codes(numbers: Tensor, mantissa: int, top: int) -> Tensor:
    """Return the codes of ``numbers``, not negative, without a sign."""
    exponents = numbers.view(torch.int32) >> _MANTISSA
    places = exponents.sub_(_BIAS + mantissa).clamp_(min=0)  # to shift a mantissa by
    inverse = (_BIAS - places << _MANTISSA).view(torch.float32)
    codes = (numbers * inverse).round_().to(torch.int32)
    return codes.add_(places << mantissa).clamp_(0, top)


def _table(mantissa: int, top: int, sign: int, device: torch.device) -> Tensor:
    """Return the numbers of all 2·sign codes, as shares of the largest number, float32.

    Codes above T, which no encoder sends, are NaN.
    """
    code = torch.arange(sign, device=device)
    places = ((code >> mantissa) - 1).clamp_(min=0)
    shares = (code - (places << mantissa) << places).float() / number(top, mantissa)
    shares[top + 1 :] = torch.nan
    return torch.cat([shares, -shares])


_TABLE = LookupTable(_table)


@functools.cache
def _book(mantissa: int, top: int, sign: int) -> Book:
    """Return the format as kernels read it."""
    known = [float(number(code, mantissa)) for code in range(top + 1)]
    middles = torch.tensor(
        [(a + b) / 2 for a, b in itertools.pairwise(known)], dtype=torch.float32, device="cpu"
    )
    # The higher number gets what is at a middle if rounding takes it there.
    up = _codes(middles, mantissa, top) > torch.arange(top, device="cpu")
    middles = torch.where(up, middles.nextafter(torch.zeros_like(middles)), middles)
    return Book(middles, _table(mantissa, top, sign, middles.device), known[top], sign)


class Minifloat(BlockwiseCodes):
    """Round each element to the nearest number of a format in which its block fits.

    Attributes:
        format: name of the format.
        formats: name -> m and T; the first is the default.
    """

    format: str
    formats: ClassVar[Mapping[str, tuple[int, int]]]

    coding = "sign, exponent, mantissa"
    numbers = ("scales",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in self.formats:
            known = ", ".join(map(repr, self.formats))
            raise ValueError(
                f"{type(self).__name__}(format={self.format!r}): formats are {known}; use "
                f"{next(iter(self.formats))!r}."
            )

    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        largest = blocks.abs().amax(dim=1).float()  # (b,)
        shares = blocks / largest.where(largest > 0, 1.0).view(-1, 1)
        return nearest(shares, *self.formats[self.format], sign=2 ** (self.bits - 1)), largest

    @property
    def in_kernels(self) -> BlockCode:
        book = _book(*self.formats[self.format], 2 ** (self.bits - 1))
        return BlockCode("book", self.bits, self.block_size, 1, book)

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        sign = 2 ** (self.bits - 1)
        known = _TABLE(*self.formats[self.format], sign, device=codes.device)
        found = known.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return found.mul_(numbers[0].view(-1, 1))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − max(ρ², n / (4·T² + n)), for n = min(block_size, numel) − 1.

        T is the largest number in units of the smallest above zero. It is the block's largest
        element and sent exactly. Numbers with m bits of mantissa are rounded by at most
        ρ = u / (1 + u) of themselves, where u = 2^−(m+1). Smaller numbers are rounded by at most
        1/2, and at most to zero. If n elements of 1/2 accompany T, the error is
        ``n/4 / (T² + n/4)``, and no mixture is worse.
        """
        mantissa, top = self.formats[self.format]
        others = min(self.block_size, max(1, numel)) - 1
        half = 2.0 ** -(mantissa + 1)
        lost = others / (4 * number(top, mantissa) ** 2 + others)
        return Contraction(1 - min(1.0, _ROUNDING * max((half / (1 + half)) ** 2, lost)))
