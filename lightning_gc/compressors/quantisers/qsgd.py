"""QSGD: send each element as a few bits, rounded at random so that it is unbiased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gc.compressors.quantisers.blockwise_codes import BlockwiseLevels


@dataclass(frozen=True)
class QSGD(BlockwiseLevels):
    """Round each element at random to one of s = 2^(bits−1) − 1 levels of its block's norm.

    ``C(x)_i = norm · sign(x_i) · ξ_i / s``, where ξ_i is one of the two whole numbers around
    ``s·|x_i| / norm``, drawn so that ``E C(x) = x``. It is ``Uniform(rounding="stochastic")`` with
    other defaults.

    Args:
        bits: 2..16 bits an element, the sign included. Lower means more compression. A paper's
            "s levels" are of the magnitude: 7, 5 and 3 bits have 63, 15 and 3.
        block_size: elements that share one norm. Smaller means less error and more norms to send.
            One norm for each tensor, as papers state the method: any size that no tensor exceeds.
        norm: ``"max"`` (largest magnitude; less error) or ``"l2"`` (the paper's; sparser codes).

    Codes are packed without padding. For 4 bits in blocks of 512 an element takes 4.06 bits.

    The paper's experiments have our defaults: the largest magnitude in blocks of 512. Its theory,
    and surveys, have ``norm="l2"``, where ``E‖error‖²`` may be ``√d/s`` times ``‖x‖²``. The paper
    codes the codes by their frequencies, as ``CodedQSGD`` does. Under ``TwoShot``, the default
    among more than two workers, each worker's shard has its own blocks and norms, and the mean is
    rounded a second time; under ``AllGather()`` every worker's tensor is rounded once, and bytes
    grow with W.

    Example:
        >>> from lightning_gc import QSGD
        >>> QSGD(bits=3).at(8)
        QSGD(bits=8, block_size=512, norm='max')

    Reference:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding", NeurIPS 2017.
    """

    bits: int = 4
    block_size: int = 512
    norm: Literal["max", "l2"] = "max"

    rounding = "stochastic"

    @classmethod
    def examples(cls) -> tuple[QSGD, ...]:
        return (cls(4), cls(2, 7), cls(3, 64, "l2"), cls(9, 512, "l2"), cls(16))
