"""Codes of blocks: what kernels need to know of a quantiser with a few numbers for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

RANGE = 6
"""Standard deviations that the bins of ``BinMeans`` cover."""


@dataclass(frozen=True, eq=False)
class Book:
    """The values that codes have, as shares of a block's largest magnitude.

    Args:
        middles: ascending, on the host, ``(n,)`` float32. A share's code is the number of middles
            below it.
        values: of all codes, on the host, float32.
        top: with it, magnitudes times ``top`` are compared with the middles, and NaN counts as 0.
        sign: added to the codes of negative shares.
    """

    middles: Tensor
    values: Tensor
    top: float = 0.0
    sign: int = 0


@dataclass(frozen=True, eq=False)
class BlockCode:
    """A code of ``bits`` bits for each element, and a few numbers for each block.

    Args:
        kind: ``"bins"`` as ``BinMeans`` has them, ``"range"`` as of ``Int8``, or of a book.
        bits: of a code, 1 to 8.
        block_size: elements of a block.
        numbers: float32 numbers sent for each block.
        book: for the kind ``"book"``.
    """

    kind: Literal["bins", "range", "book"]
    bits: int
    block_size: int
    numbers: int
    book: Book | None = None
