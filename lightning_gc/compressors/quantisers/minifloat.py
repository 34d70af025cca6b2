"""Minifloat: floats of few bits, by mantissa bits m and the code T of the largest number.

A code without its sign is ``exponent · 2^m + fraction``, with subnormal numbers as in IEEE 754. It
stands for a whole number of the smallest number above zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


class LookupTable:
    """Returns the tensor that ``make`` makes of some arguments and a device; nobody may change it.

    Making it on the host takes longer than a small tensor's codes, so there it is kept. On a GPU it
    is not: another stream could read it before it is made.

    Example:
        >>> double = LookupTable(lambda count, device: torch.arange(count, device=device) * 2)
        >>> double(3, device=torch.device("cpu"))
        tensor([0, 2, 4])
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self.make = make
        self._kept = functools.cache(make)

    def __call__(self, *settings: int, device: torch.device) -> Tensor:
        """Return the table of these settings, there."""
        make = self._kept if device.type == "cpu" else self.make
        return make(*settings, device=device)


_MANTISSA, _BIAS = 23, 127  # of float32
ROUNDING = 1.0001
"""What float32's own rounding, 2^−22 at most, may add to a squared error, as a factor."""


def number(code: int, mantissa: int) -> int:
    """Return what a code without its sign stands for, in units of the smallest above zero.

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
    numbers = shares.abs().float() * number(top, mantissa)
    exponents = numbers.view(torch.int32) >> _MANTISSA
    places = exponents.sub_(_BIAS + mantissa).clamp_(min=0)  # to shift a mantissa by
    inverse = (_BIAS - places << _MANTISSA).view(torch.float32)
    codes = (numbers * inverse).round_().to(torch.int32)
    codes.add_(places << mantissa).clamp_(0, top)
    return codes.add_((shares < 0) * sign).to(torch.uint8)


def _table(mantissa: int, top: int, sign: int, device: torch.device) -> Tensor:
    """Return what each of 2·sign codes stands for, as a share of the largest number, float32.

    Codes above T, which no encoder sends, are NaN.
    """
    code = torch.arange(sign, device=device)
    places = ((code >> mantissa) - 1).clamp_(min=0)
    shares = (code - (places << mantissa) << places).float() / number(top, mantissa)
    shares[top + 1 :] = torch.nan
    return torch.cat([shares, -shares])


table = LookupTable(_table)


def kept(mantissa: int, top: int, others: int) -> float:
    """Return δ of the error of a block: ``1 − max(ρ², n / (4·T² + n))``, with n ``others``.

    These are the elements beside the largest. In units of the smallest number, the largest is T and
    sent as it is. Numbers of m bits of mantissa are rounded by at most ρ = u / (1 + u) of
    themselves, where u = 2^−(m+1). Smaller ones are rounded by at most 1/2, and at most to zero; n
    of 1/2 beside T make ``n/4 / (T² + n/4)``, and no mixture is worse.
    """
    half = 2.0 ** -(mantissa + 1)
    lost = others / (4 * number(top, mantissa) ** 2 + others)
    return 1 - min(1.0, ROUNDING * max((half / (1 + half)) ** 2, lost))
