"""Signs of a bucket's parameters: the order in which their means are added, and where they lie.

A mean of floats depends on the order of its additions. Triton's kernels, numba's and ``by_torch``
keep one order, so they send the same bits:

1. A parameter is cut into pieces of ``PIECE`` elements, and a piece into rows of ``LANES``.
2. A lane adds the elements of its rows, divided by ``PIECE``, in their order, from 0.
3. Neighbouring lanes are added, then neighbouring sums, and so on, up to one sum per piece.
4. The pieces' sums, times ``PIECE/count``, are added in the same way, in rows of ``SUMS``.

So no sum exceeds the largest magnitude, and a mean of large numbers is finite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.core.bit_packing import pack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.segments import PIECE, Pending
from lightning_gc.kernels import permutation
from lightning_gc.kernels.shards import Layout, Parts, ShardTable

Levels = Literal["magnitude", "means", "votes"]
"""Numbers sent with a tensor's signs: see ``SignTable``."""

LANES = 2048
"""Elements in a row of a piece."""
SUMS = 256
"""Pieces in a row of a parameter."""


def share_of(count: int) -> float:
    """Return ``PIECE/count`` as float32 has it; a count below 1 counts as 1."""
    return PIECE * float(np.float32(1) / np.float32(max(1, count)))


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


class SignTable(ShardTable):
    """Encodes and decodes parts of a bucket, or W shards of each, in signs and levels.

    Args:
        parts, shards: as for ``kernels.shards.Layout``.
        levels: ``"magnitude"``: the mean magnitude. ``"means"``: the means of elements below 0 and
            of the others. ``"votes"``: 1, or 0 of a tensor of zeros; an element that is zero has a
            random sign, and the result is the majority's.
        device: of the bucket.
    """

    def __init__(self, parts: Parts, levels: Levels, device: torch.device, shards: int = 1) -> None:
        layout = Layout(parts, 1, sys.maxsize, shards)  # a block is a whole part
        super().__init__(layout, layout.blocks * (2 if levels == "means" else 1))
        self.levels, self.device = levels, device


def attempt(
    table: type[SignTable], numbers: Tensor, pending: Callable[[], Pending] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of a table of kernels for ``numbers``, and beside each the result of torch.

    With ``pending`` there are two parameters, and the second one is idle.
    """
    names = "a" if pending is None else "ab"
    size = numbers.numel() // len(names)
    parts = [(name, i, size * i, size * (i + 1)) for i, name in enumerate(names)]
    first, x = pending and pending(), numbers
    if first is not None and first.grad is not None:
        x = first.decay * numbers + first.grad
    used, rest, places = x[:size], torch.zeros_like(x[size:]), torch.arange(size, device=x.device)
    negative, zeros = used < 0, used == 0
    magnitude, fewer = by_torch(used.abs(), share_of(size)), int(negative.sum())
    one, below = torch.ones_like(magnitude), by_torch(used.where(negative, 0.0), share_of(fewer))
    sent: dict[Levels, tuple[Tensor, Tensor]] = {
        "magnitude": (-magnitude, magnitude),
        "means": (below, by_torch(used.where(~negative, 0.0), share_of(size - fewer))),
        "votes": (-one, one),
    }
    for levels, (low, high) in sent.items():
        given, left, out = pending and pending(), numbers.clone(), numbers.clone()
        bucket = Bucket(numbers, dict.fromkeys(names, (size,)), pending=given)
        made = table(parts, levels, numbers.device)
        ((signs, means),) = made.encode(left, bucket)
        tossed = [coins(bucket.key(name), 0, places) for name in names]
        positive, idle = ~negative, torch.ones_like(negative)
        if levels == "votes":
            positive, idle = torch.where(zeros, tossed[0], positive), tossed[-1]
        masks = [positive, idle][: len(names)]
        yield signs, torch.cat([pack(mask.to(torch.uint8), 1) for mask in masks])
        own = [low, high][levels != "means" :]
        yield means, torch.stack([*own, *torch.zeros_like(means[len(own) :])])
        value = torch.cat([torch.where(positive, high, low), rest])
        yield left, x - value
        made.average([(signs, means)] * 3, out, given)
        third = torch.zeros_like(value)
        for _ in range(3):
            third.add_(value, alpha=1 / 3)
        yield out, value if levels == "votes" else third


def least_of(workers: int) -> float:
    """Return what a mean of W votes exceeds in magnitude unless it is zero up to rounding."""
    return 0.5 / workers


def coins(key: int, step: int, places: Tensor) -> Tensor:
    """Return random bits, bool, for elements of a tensor at ``places``, ``(n,)`` int64."""
    return permutation.word(key, step, places) >= 1 << 31
