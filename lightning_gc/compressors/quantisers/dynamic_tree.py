"""DynamicTree: send each element as one of 256 values, with wider spaces between large ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Traits
from lightning_gc.compressors.quantisers.blockwise_codes import (
    BLOCK_SIZES,
    Blockwise8Bit,
    LookupTable,
)
from lightning_gc.kernels.blocks import BlockCode, Book

_DECADES = 7
_ROUNDING = 1.0001


@dataclass(frozen=True)
class DynamicTree(Blockwise8Bit):
    """Round each element to the nearest of 256 values: fine ones near the largest, seven decades.

    ``C(x)_i = L · nearest(x_i / L)``, where L is the largest magnitude of the block. A byte has
    one bit for the sign, leading zeros that count the decades, and a linear fraction in the rest:
    64 values of either sign between 0.1 and 1, 32 between 0.01 and 0.1, down to one between 10^−7
    and 10^−6; then 0 and 1. So larger values are more exact, and none of seven decades is lost. −1
    is not among the values; −0.993 is.

    Args:
        block_size: elements that share L. Smaller means less error and more numbers to send.

    In blocks of 512 an element takes 8.06 bits.

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
        # The lower value gets what is at a middle.
        codes = torch.bucketize(shares.float(), _MIDDLES(device=blocks.device))
        return codes.to(torch.uint8), largest

    @property
    def in_kernels(self) -> BlockCode:
        here = torch.device("cpu")
        book = Book(_MIDDLES(device=here), _VALUES(device=here))
        return BlockCode("book", self.bits, self.block_size, 1, book)

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        known = _VALUES(device=codes.device)
        found = known.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return found.mul_(numbers[0].view(-1, 1))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − max over gaps between values of ``(ε² + n·h²) / (1 + n·m²)``.

        n is min(block_size, numel) − 1. The largest element, in units of itself, is off by at most
        ε = 0.007. The n others are worst all alike, at a middle m between two values, from both of
        which it is h away.
        """
        known = _VALUES(device=torch.device("cpu")).double()
        others = min(self.block_size, max(1, numel)) - 1
        middles, halves = (known[1:] + known[:-1]) / 2, (known[1:] - known[:-1]) / 2
        top = float(1 + known[0]) ** 2
        lost = (top + others * halves**2) / (1 + others * middles**2)
        return Contraction(1 - _ROUNDING * max(top, float(lost.max())))

    @classmethod
    def examples(cls) -> tuple[DynamicTree, ...]:
        return (cls(), cls(7))


def _made(device: torch.device) -> Tensor:
    """Return the 256 values, ascending, float32."""
    positive = []
    for decade in range(_DECADES):
        places = torch.arange(2**decade, dtype=torch.float64, device=device)
        # The middles of 2^decade equal parts of 0.1 to 1.
        shares = places.add_(0.5).mul_(0.9 / 2**decade).add_(0.1)
        positive.append(shares.mul_(10.0 ** (decade - _DECADES + 1)))
    ends = torch.arange(2, dtype=torch.float64, device=device)
    above = torch.cat(positive)
    return torch.cat([-above.flip(0), ends[:1], above, ends[1:]]).float()


def _middles(device: torch.device) -> Tensor:
    """Return where one value ends and the next begins, ``(255,)``."""
    known = _made(device)
    return (known[1:] / 2).add_(known[:-1] / 2)


_VALUES, _MIDDLES = LookupTable(_made), LookupTable(_middles)
