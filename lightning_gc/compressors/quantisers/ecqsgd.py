"""ECQSGD: QSGD with a share of its errors fed back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from lightning_gc.compressors.quantisers.blockwise_codes import BLOCKS, CODES
from lightning_gc.compressors.quantisers.qsgd import QSGD
from lightning_gc.compressors.wrappers.wrapper import Preset


@dataclass(frozen=True)
class ECQSGD(Preset):
    """Error Compensated Quantized SGD: ``QSGD`` of the gradient and a share of past errors.

    Its default memory is ``WeightedError(alpha=0.2, beta=0.9)``. QSGD needs no memory, but with few
    bits its variance is large, and a share of the errors fed back reduces it.

    Args:
        bits: as ``QSGD``'s.
        block_size: as ``QSGD``'s.
        norm: as ``QSGD``'s.

    Example:
        >>> from lightning_gc import ECQSGD, CompressedDDPStrategy
        >>> CompressedDDPStrategy(ECQSGD(bits=2)).memory
        WeightedError(alpha=0.2, beta=0.9)

    Reference:
        Wu, Huang, Huang and Zhang, "Error Compensated Quantized SGD and its Applications to
        Large-scale Distributed Optimization", ICML 2018.
    """

    bits: int = 4
    block_size: int = 512
    norm: Literal["max", "l2"] = "max"
    limits = {"bits": CODES, "block_size": BLOCKS}

    memory_name = "weighted_error"

    @functools.cached_property
    def inner(self) -> QSGD:
        return QSGD(self.bits, self.block_size, self.norm)

    @classmethod
    def examples(cls) -> tuple[ECQSGD, ...]:
        return (cls(), cls(2, 64))
