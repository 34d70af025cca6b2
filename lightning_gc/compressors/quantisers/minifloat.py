"""Minifloat: base class of quantisers to floats of few bits.

A format has m bits of mantissa, and T is the code of its largest number. A code without its sign is
``exponent · 2^m + fraction``, with subnormal numbers as in IEEE 754. It means an integer multiple
of the smallest number above zero, ``2^−p``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction
from lightning_gc.compressors.quantisers.blockwise_codes import BlockwiseCodes, LookupTable
from lightning_gc.core import Wire
from lightning_gc.kernels.blocks import BlockCode, Book

_MANTISSA, _BIAS = 23, 127  # of float32
_E4M3 = (3, 126, 128, 512)  # of a block's scale
_ROUNDING = 1.0001  # factor by which float32's rounding, at most 2^−22, may raise squared errors


def number(code: int, mantissa: int) -> int:
    """Return the number of a code without its sign, in units of the smallest number above zero.

    Example:
        >>> [number(code, mantissa=1) for code in range(8)]  # E2M1: its unit is 1/2
        [0, 1, 2, 3, 4, 6, 8, 12]
    """
    places = max(0, (code >> mantissa) - 1)
    return code - (places << mantissa) << places


def nearest(x: Tensor, mantissa: int, top: int, sign: int, units: int) -> Tensor:
    """Return the codes, uint8, of the numbers nearest to ``x``, any shape.

    Ties go to the even code. Numbers above the largest one become the largest one.

    Args:
        x: finite.
        mantissa: m.
        top: T.
        sign: added to the codes of negative numbers.
        units: of the smallest number above zero that make 1.
    """
    codes = _codes(x.abs().float() * units, mantissa, top)
    return codes.add_((x < 0) * sign).to(torch.uint8)


def _codes(numbers: Tensor, mantissa: int, top: int) -> Tensor:
    """Return the codes of ``numbers``, not negative, without a sign."""
    exponents = numbers.view(torch.int32) >> _MANTISSA
    places = exponents.sub_(_BIAS + mantissa).clamp_(min=0)  # to shift a mantissa by
    inverse = (_BIAS - places << _MANTISSA).view(torch.float32)
    codes = (numbers * inverse).round_().to(torch.int32)
    return codes.add_(places << mantissa).clamp_(0, top)


def _table(mantissa: int, top: int, sign: int, units: int, device: torch.device) -> Tensor:
    """Return the numbers of all 2·sign codes, float32.

    Codes above T, which no encoder sends, are NaN.
    """
    code = torch.arange(sign, device=device)
    places = ((code >> mantissa) - 1).clamp_(min=0)
    numbers = (code - (places << mantissa) << places).float()
    # By a tensor: a GPU would multiply by the rounded 1/units if it were a Python number.
    numbers /= numbers.new_full((), units)
    numbers[top + 1 :] = torch.nan
    return torch.cat([numbers, -numbers])


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
    table = _table(mantissa, top, sign, number(top, mantissa), middles.device)
    return Book(middles, table, known[top], sign)


class Minifloat(BlockwiseCodes):
    """Round each element to the nearest number of a format in which its block fits.

    Attributes:
        format: name of the format.
        formats: name -> m, T and p; the first is the default.
        scaling: of a block. ``"float32"``: its largest magnitude, which the largest number means.
            ``"e8m0"``: a power of two, with which the largest magnitude has the exponent of the
            largest number. ``"e4m3"``: the largest magnitude as above, in 8 bits.
    """

    format: str
    formats: ClassVar[Mapping[str, tuple[int, int, int]]]
    scaling: ClassVar[Literal["float32", "e8m0", "e4m3"]] = "float32"

    coding = "sign, exponent, mantissa"
    numbers = ("scales",)

    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        sent = self._scale_codes(blocks.abs().amax(dim=1).float())  # (b,)
        scales = self._scales(sent)
        x = blocks / scales.where(scales > 0, torch.inf if self.scaling == "e4m3" else 1.0)[:, None]
        mantissa, top, _ = self.formats[self.format]
        return nearest(x, mantissa, top, 2 ** (self.bits - 1), self._units), sent

    @property
    def in_kernels(self) -> BlockCode | None:
        if self.scaling != "float32":
            return None
        mantissa, top, _ = self.formats[self.format]
        book = _book(mantissa, top, 2 ** (self.bits - 1))
        return BlockCode("book", self.bits, self.block_size, 1, book)

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        mantissa, top, _ = self.formats[self.format]
        known = _TABLE(mantissa, top, 2 ** (self.bits - 1), self._units, device=codes.device)
        found = known.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return found.mul_(self._scales(numbers[0]).view(-1, 1))

    def wire(self, numel: int) -> Wire:
        codes, scales = super().wire(numel)
        if self.scaling == "float32":
            return codes, scales
        note = f"{self.scaling}, per block"
        return codes, replace(scales, dtype=torch.uint8, note=note)

    @property
    def _units(self) -> int:
        """Units of the smallest number above zero that a block's scale has."""
        mantissa, top, places = self.formats[self.format]
        return number(top, mantissa) if self.scaling == "float32" else 2**places

    def _scale_codes(self, largest: Tensor) -> Tensor:
        """Return the scales of blocks with these largest magnitudes, as they are sent."""
        if self.scaling == "float32":
            return largest
        mantissa, top, places = self.formats[self.format]
        most = number(top, mantissa)
        if self.scaling == "e4m3":
            return nearest(largest * (2**places / most), *_E4M3)
        above = places - most.bit_length() + 1  # minus the exponent of the largest number
        # As an exponent of float32, 0 is for zero and subnormal numbers, 255 for infinity and NaN.
        return ((largest.view(torch.int32) >> _MANTISSA) + above).clamp_(1, 254).to(torch.uint8)

    def _scales(self, sent: Tensor) -> Tensor:
        if self.scaling == "float32":
            return sent
        if self.scaling == "e4m3":
            return _TABLE(*_E4M3, device=sent.device).index_select(0, sent.int())
        return (sent.int() << _MANTISSA).view(torch.float32)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − max(ρ², (a²·L² + n/4) / (L² + n/4)), n = min(block_size, numel) − 1.

        L is the block's largest element in units of the smallest number above zero, and a the share
        of it that is not sent. A float32 scale sends it exactly: a = 0, and L is the largest
        number, T. Other numbers with m bits of mantissa are rounded by at most ρ = u / (1 + u) of
        themselves, where u = 2^−(m+1). Smaller numbers are rounded by at most 1/2, and at most to
        zero. If n elements of 1/2 accompany L, the error is as above, and no mixture is worse.

        With a power of two as scale, L is from 2^k to 2^(k+1) for ``2^k ≤ T``, and what is above T
        is cut: a = max(ρ, 1 − T/2^(k+1)). An 8-bit scale is at most 1/17 off, so that a = 1/17 and
        L ≥ 17/18·T. It is more off in blocks below 1/14,336 of the tensor's largest element, which
        add at most ``numel/14,336²``.
        """
        mantissa, top, _ = self.formats[self.format]
        most, half = number(top, mantissa), 2.0 ** -(mantissa + 1)
        relative, small = half / (1 + half), 0.0
        largest, unsent = float(most), 0.0
        if self.scaling == "e8m0":
            largest = 2.0 ** (most.bit_length() - 1)
            unsent = max(relative, 1 - most / (2 * largest))
        elif self.scaling == "e4m3":
            largest, unsent, small = most * 17 / 18, 1 / 17, numel / 14336**2
        lost = (min(self.block_size, max(1, numel)) - 1) / 4
        share = ((unsent * largest) ** 2 + lost) / (largest**2 + lost)
        return Contraction(1 - min(1.0, _ROUNDING * (max(relative**2, share) + small)))
