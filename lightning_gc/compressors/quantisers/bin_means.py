"""BinMeans: send each element as the mean of its bin, of a few bins by standard deviations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Knob, Traits
from lightning_gc.compressors.quantisers.blockwise_codes import BLOCK_SIZES, BlockwiseCodes
from lightning_gc.core import Range
from lightning_gc.kernels.blocks import RANGE, BlockCode
from lightning_gc.kernels.signs import in_pairs


@dataclass(frozen=True)
class BinMeans(BlockwiseCodes):
    """Sort each block's elements into 2^bits bins, and send bins and the mean of each bin.

    Bins are ``6σ / 2^bits`` wide, from −3σ to 3σ, where σ² is the mean square of the block; the
    outer ones hold what is beyond. Zero is an edge, and belongs to the upper bin. ``C(x)_i`` is the
    mean of the block's elements in the bin of x_i: a codebook that fits the values better than
    equal steps. With one bit it is ``OneBitSGD`` in blocks.

    Args:
        bits: 1..4 bits an element. Lower means more compression.
        block_size: elements that share bins. Smaller means less error and more means to send: 4
            bytes for each of 2^bits bins.

    With 2 bits in blocks of 512 an element takes 2.25 bits.

    Example:
        >>> import torch
        >>> from lightning_gc import BinMeans
        >>> from lightning_gc.testing import Lockstep
        >>> given = torch.tensor([-1.0, 1.0, 1.2, 1.4, 4.0])
        >>> Lockstep(1, BinMeans(2)).step([{"w": given}]).mean["w"]
        tensor([-1.0000,  1.2000,  1.2000,  1.2000,  4.0000])

    Reference:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, which sends
        the values of ``Quantised(ChunkedTopK(), BinMeans(2))`` so. Code of its authors has bins of
        the same width, and their means. It subtracts the mean of all values first, has zero in the
        middle of a bin, not at an edge, so that there is one bin more below than above, and has one
        set of bins for a tensor. With an edge at zero no sign is lost.
    """

    bits: int = 2
    block_size: int = 512
    limits = {"bits": "[1, 4] the number of bits; 2 for 4 bins"}

    coding = "bins, ascending"
    traits = Traits(
        kind="quantiser",
        knob=Knob("bits", low=1, high=4, scale="linear", integer=True),
        space=(Range("bits", 1, 4, integer=True), BLOCK_SIZES),
        portable=True,
    )

    @property
    def numbers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"mean_{i}" for i in range(2**self.bits))

    def filling(self, part: Tensor) -> Tensor:
        """Return NaN, which is in no bin."""
        return part.new_full((1,), torch.nan)

    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        bins = 2**self.bits
        there = ~blocks.isnan()
        given = blocks.masked_fill(~there, 0)
        # A power of two next to the inverse of the largest, so that squares stay in range.
        largest = given.abs().amax(dim=1, keepdim=True).float()  # (b, 1)
        exponent = (254 - (largest.view(torch.int32) >> 23)).clamp_(1, 253)
        down, up = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
        unit = given * down + 0.0  # not -0.0
        squares = in_pairs(unit.square()) / there.sum(dim=1).clamp_(min=1)
        sigma = squares.sqrt_().view(-1, 1)
        sigma = sigma.where(sigma > 0, 1.0)
        codes = torch.zeros_like(blocks, dtype=torch.uint8)
        for i in range(1, bins):
            codes += unit >= sigma * ((i - bins // 2) * (RANGE / bins))
        means = []
        for i in range(bins):
            inside = (codes == i) & there
            total = in_pairs(unit.where(inside, 0.0)) / inside.sum(dim=1).clamp_(min=1)
            means.append(total.float() * up.view(-1))
        return codes, *means

    @property
    def in_kernels(self) -> BlockCode:
        return BlockCode("bins", self.bits, self.block_size, 2**self.bits)

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        means = torch.stack(numbers, dim=1)  # (b, bins)
        return means.gather(1, codes.long())

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1/d, d = min(block_size, numel), as of signs and their two means.

        ``‖x − C(x)‖² = ‖x‖² − Σ_j n_j·μ_j²``. As no bin has elements of both signs, that sum is at
        least ``‖x‖₁²/d ≥ ‖x‖²/d``. Mostly it is far more.
        """
        return Contraction(1 / min(self.block_size, max(1, numel)))

    @classmethod
    def examples(cls) -> tuple[BinMeans, ...]:
        return (cls(), cls(1, 7), cls(3, 64))
