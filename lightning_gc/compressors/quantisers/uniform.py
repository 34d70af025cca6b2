"""Uniform: send each element as the nearest of equidistant levels, with 2 to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gc.compressors.quantisers.blockwise_codes import BlockwiseLevels


@dataclass(frozen=True)
class Uniform(BlockwiseLevels):
    """Round each element to the nearest of the levels −s/s, ..., 0, ..., s/s of its block's norm.

    ``C(x)_i = norm · sign(x_i) · round(s·|x_i| / norm) / s`` with ``s = 2^(bits−1) − 1``; halves
    are rounded away from zero. The symmetric b-bit quantiser: zero is sent as zero, and so is all
    that is below ``norm / 2s``. Without error feedback that part of the gradient is lost at every
    step: a large element in a block, or few bits, then stop the others from being trained.

    Args:
        bits: 2..16 bits an element, the sign included. Lower means more compression.
        rounding: ``"nearest"``, biased, with error feedback by default; or ``"stochastic"``,
            which is ``QSGD`` with the same bits, blocks and norm: unbiased, without feedback.
        block_size: elements that share one norm. Smaller means less error and more norms to send.
            One norm for each tensor ("global scale"): any size that no tensor exceeds.
        norm: what the levels are fractions of. ``"max"``, the block's largest magnitude, which is
            then sent exactly. ``"l2"``, the block's length, is for ``"stochastic"``: most levels
            are above all elements, and of 4s² elements or more the nearest may be 0 for all.

    Example:
        >>> import torch
        >>> from lightning_gc import NoMemory, Uniform
        >>> from lightning_gc.testing import Lockstep
        >>> alone = Lockstep(1, Uniform(bits=3), NoMemory())
        >>> alone.step([{"w": torch.tensor([3.0, -1.6, 1.4, 0.4])}]).mean["w"]
        tensor([ 3., -2.,  1.,  0.])

    Reference:
        Linear quantisation, in wide use: Jacob et al., "Quantization and Training of Neural
        Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018 (there with an offset
        for zero, as in ``Int8``). Papers that quantise gradients to "b bits" and say no more mean
        most likely this, with one norm per tensor and no error feedback:
        ``Uniform(8, block_size=1 << 24)`` with ``memory=NoMemory()``.
    """

    bits: int = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"
    block_size: int = 512
    norm: Literal["max", "l2"] = "max"
    limits = {"rounding": "use 'nearest', or 'stochastic' as in QSGD"}

    @classmethod
    def examples(cls) -> tuple[Uniform, ...]:
        return (
            cls(),
            cls(2, block_size=7),
            cls(16, block_size=1 << 20),
            cls(7, block_size=64, norm="l2"),
            cls(5, "stochastic"),
        )
