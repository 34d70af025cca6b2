"""Signs of a bucket's parameters: the order in which their means are added, and a table of pieces.

A mean of floats depends on the order of its additions. Triton's kernels, numba's and ``by_torch``
keep one order, so they send the same bits:

1. A parameter is cut into pieces of ``PIECE`` elements, and a piece into rows of ``LANES``.
2. A lane adds the elements of its rows, divided by ``PIECE``, in their order, from 0.
3. Neighbouring lanes are added, then neighbouring sums, and so on, up to one sum per piece.
4. The pieces' sums, times ``PIECE/count``, are added in the same way, in rows of ``SUMS``.

So no sum exceeds the largest magnitude, and a mean of large numbers is finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.core.segments import PIECE
from lightning_gc.kernels.dispatch import compiled, family

LANES = 2048
"""Elements in a row of a piece."""
SUMS = 256
"""Pieces in a row of a parameter."""


def mean(numbers: Tensor, count: int | Tensor) -> Tensor:
    """Return the sum of ``numbers`` divided by ``count``, 0-dim float32; 0 without numbers.

    On an accelerator torch adds in its own order, in one operation.

    Args:
        numbers: ``(n,)``.
        count: a number, or a tensor of one on the device; less than 1 counts as 1.

    Example:
        >>> mean(torch.tensor([3.0, 1.0]), 2)
        tensor(2.)
    """
    if numbers.device.type != "cpu":
        number = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        return (numbers / number).sum().float()
    if not numbers.numel():
        return numbers.new_zeros((), dtype=torch.float32)
    share = PIECE * float(np.float32(1) / np.float32(max(1, int(count))))
    if compiled(numbers):
        found: Tensor = family("signs", numbers).mean(numbers, share)
        return found
    return by_torch(numbers, share)


def by_torch(numbers: Tensor, share: float) -> Tensor:
    """Return the sum of ``numbers / PIECE`` times ``share``, 0-dim, in the order above."""
    numbers = numbers * (1 / PIECE)
    full = numbers.numel() // PIECE
    pieces = numbers[: full * PIECE].view(full, PIECE // LANES, LANES)
    sums = []
    if full:
        lanes = pieces[:, 0] + 0.0  # not -0.0
        for row in range(1, pieces.shape[1]):
            lanes += pieces[:, row]
        sums.append(in_pairs(lanes))
    if full * PIECE < numbers.numel():
        sums.append(in_pairs(_lanes(numbers[full * PIECE :], LANES)))
    if len(sums) == 1 and full < 2:
        return sums[0].mul(share).view(()).float()
    return in_pairs(_lanes(torch.cat(sums) * share, SUMS)).view(()).float()


def _lanes(numbers: Tensor, width: int) -> Tensor:
    """Return sums of the rows of ``numbers``, ``(1, width)`` or narrower."""
    total = numbers[:width] + 0.0  # not -0.0
    for row in numbers[width:].split(width):
        total[: row.numel()] += row
    return total.view(1, -1)


def in_pairs(lanes: Tensor) -> Tensor:
    """Return the sum of each row of ``lanes``, ``(n, width)``: of neighbours, again and again."""
    while lanes.shape[1] > 1:
        if lanes.shape[1] % 2:
            lanes = pad(lanes, (0, 1))
        lanes = lanes[:, ::2] + lanes[:, 1::2]
    return lanes[:, 0]


def table_of(parts: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return a table of the pieces of ``parts``, ``(8, m)`` int32 on ``device``, for the kernels.

    Args:
        parts: of each parameter, its index among the bucket's that are not empty, its first
            element and its end.
        device: of the bucket.

    Returns:
        Of each piece the parameter's index, first element, end, place of its first byte of signs;
        index among ``parts``, the parameter's first piece, number of pieces and elements.
    """
    rows, byte = list[tuple[int, ...]](), 0
    for index, (place, begin, end) in enumerate(parts):
        first, pieces = len(rows), -(-(end - begin) // PIECE)
        for start in range(begin, end, PIECE):
            stop, here = min(start + PIECE, end), byte + (start - begin) // 8
            rows.append((place, start, stop, here, index, first, pieces, end - begin))
        byte += packed_bytes(end - begin, 1)
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 8).t().contiguous()
