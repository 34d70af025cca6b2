"""Int8: send each element as one of 256 equidistant values in the range of its block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Traits
from lightning_gc.compressors.quantisers.blockwise_codes import BLOCK_SIZES, Blockwise8Bit
from lightning_gc.kernels.blocks import BlockCode

_STEPS = 255
_ROUNDING = 1.0001


@dataclass(frozen=True)
class Int8(Blockwise8Bit):
    """Round each element to the nearest of 256 values from its block's smallest to its largest.

    ``C(x)_i = low + (high − low)·c_i / 255`` with ``c_i = round(255·(x_i − low) / (high − low))``.
    Both ends are sent as they are, since ``high − low`` may be beyond float32. Zero is usually none
    of the values, so zeros get a small error. In blocks of 512 an element takes 8.125 bits.

    Args:
        block_size: elements that share one range. Smaller means less error and more ranges to send.

    Example:
        >>> import torch
        >>> from lightning_gc import Int8
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, Int8()).step([{"w": torch.tensor([0.0, 76.7, 255.0])}]).mean["w"]
        tensor([  0.,  77., 255.])

    Reference:
        Min-max quantisation, in wide use: Jacob et al., "Quantization and Training of Neural
        Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018; for gradients, in
        Bagua's ByteGrad: Gan et al., "BAGUA: Scaling up Distributed Learning with System
        Relaxations", VLDB 2022.
    """

    block_size: int = 512
    limits = {
        "block_size": (
            "[1, 65536] a block's number of elements; 512. In larger blocks the error may be "
            "larger than half of the gradient"
        ),
    }

    coding = "steps from low to high"
    numbers = ("lows", "highs")
    traits = Traits(kind="quantiser", space=(BLOCK_SIZES,))

    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        low, high = blocks.amin(dim=1).float() + 0.0, blocks.amax(dim=1).float() + 0.0  # not -0.0
        # Halves: the whole of a difference may be beyond float32.
        extent = (high / 2 - low / 2).view(-1, 1)
        share = (blocks / 2 - low.view(-1, 1) / 2) / extent.where(extent > 0, 1.0)
        codes = share.mul_(_STEPS).round_().clamp_(0, _STEPS).nan_to_num_(0.0)
        return codes.to(torch.uint8), low, high

    @property
    def in_kernels(self) -> BlockCode:
        return BlockCode("range", self.bits, self.block_size, 2)

    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        low, high = (number.view(-1, 1) for number in numbers)
        # By a tensor: a GPU would multiply by the rounded 1/255 if it were a Python number.
        share = codes.float().div_(low.new_full((), _STEPS))
        # Not above either end, where rounding would make the largest number of all infinite.
        return ((1 - share).mul_(low)).add_(share.mul_(high)).clamp_(low, high)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1 − (d − 2) / 130,037, for d = min(block_size, numel): 0.996 in blocks of 512.

        The ends are exact and the d − 2 others err by at most half a step, 1/510 of the range r;
        the squares of the ends alone sum to at least r²/2, and to M², the greater of them. That
        makes ``2·(d − 2) / 510²``, reached by zeros between −1 and 1. Float32's rounding by up to
        ``2^−23·M`` adds less than 1e-4.
        """
        others = max(0, min(self.block_size, numel) - 2)
        return Contraction(1 - _ROUNDING * 2 * others / (2 * _STEPS) ** 2)

    @classmethod
    def examples(cls) -> tuple[Int8, ...]:
        return (cls(), cls(7))
