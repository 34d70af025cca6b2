"""DynamicTree: send each element as one of 256 values whose spacing grows with their size."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.quantisers.blockwise_8bit import BLOCK_SIZES, Blockwise8Bit
from lightning_gc.compressors.traits import Traits

_DECADES = 7
_ROUNDING = 1.0001


@dataclass(frozen=True)
class DynamicTree(Blockwise8Bit):
    """Round each element to the nearest of 256 values: fine ones near the largest, seven decades.

    ``C(x)_i = L · nearest(x_i / L)``, where L is the largest magnitude of the block. Of a byte, one
    bit is the sign, leading zeros count the decades, and what is left is a linear fraction: 64
    values of either sign between 0.1 and 1, 32 between 0.01 and 0.1, down to one between 10^−7 and
    10^−6; then 0 and 1. So a value is the more exact the larger it is, and none of seven decades is
    lost. −1 is not among the values; −0.993 is.

    Args:
        block_size: elements that share L. Smaller means less error and more numbers to send.

    In blocks of 512 an element takes 8.06 bits.

    Raises:
        ValueError: ``block_size`` below 1.

    Example:
        >>> import torch
        >>> from lightning_gc import DynamicTree
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, DynamicTree()).step([{"w": torch.tensor([1.0, 0.5, 0.0])}]).mean["w"]
        tensor([1.0000, 0.5008, 0.0000])

    Reference:
        Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016. The values are
        our reading: the middles of equal parts of each decade, as in the author's later library.
    """

    block_size: int = 512

    coding = "place among the sorted values"
    numbers = ("scales",)
    traits = Traits(kind="quantiser", space=(BLOCK_SIZES,))

    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        largest = blocks.abs().amax(dim=1).float()  # (b,)
        shares = blocks / largest.where(largest > 0, 1.0).view(-1, 1)
        between = torch.tensor(_between(), device=blocks.device)
        return torch.bucketize(shares.float(), between).to(torch.uint8), largest

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        known = torch.tensor(_values(), device=codes.device)
        found = known.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return found.mul_(numbers[0].view(-1, 1))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − max over gaps between values of ``(ε² + n·h²) / (1 + n·m²)``.

        n is min(block_size, numel) − 1. The largest element, in units of itself, is off by at most
        ε = 0.007. The n others are worst all alike, at a middle m between two values, from both of
        which it is h away.
        """
        known, others = np.array(_values(), np.float64), min(self.block_size, max(1, numel)) - 1
        middles, halves = (known[1:] + known[:-1]) / 2, (known[1:] - known[:-1]) / 2
        top = (1 + known[0]) ** 2
        lost = (top + others * halves**2) / (1 + others * middles**2)
        return Contraction(1 - _ROUNDING * max(top, float(lost.max())))

    @classmethod
    def examples(cls) -> tuple[DynamicTree, ...]:
        return (cls(), cls(7))


@functools.cache
def _values() -> tuple[float, ...]:
    """Return the 256 values, ascending."""
    found: list[float] = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1, 2**decade + 1)
        middles = 10.0 ** (decade - _DECADES + 1) * (edges[1:] + edges[:-1]) / 2
        found += [*middles, *-middles]
    return tuple(float(value) for value in np.sort(np.array(found, np.float32)))


@functools.cache
def _between() -> tuple[float, ...]:
    """Return the middles between neighbours, ascending; one at a middle goes to the lower value."""
    known = np.array(_values(), np.float64)
    return tuple(float(middle) for middle in (known[1:] + known[:-1]) / 2)
