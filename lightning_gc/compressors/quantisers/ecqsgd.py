"""QSGD with a share of its errors fed back."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.compressors.quantisers.qsgd import QSGD


@dataclass(frozen=True)
class ECQSGD(QSGD):
    """Error Compensated Quantized SGD: ``QSGD`` of the gradient and a share of past errors.

    It is a name for two things that belong together: QSGD, and the memory that goes with it unless
    another is chosen, ``WeightedError(alpha=0.2, beta=0.9)``. QSGD by itself needs no memory; with
    few bits its variance is large, and a share of the errors fed back reduces it.

    Args:
        bits: as ``QSGD``'s, and so are the two that follow.
        block_size: elements that share one norm.
        norm: ``"max"`` or ``"l2"``.

    Wire format:
        As that of ``QSGD``: ``bits`` an element and a float32 norm a block.

    Raises:
        ValueError: as ``QSGD``.

    Example:
        >>> from lightning_gc import ECQSGD, CompressedDDPStrategy
        >>> CompressedDDPStrategy(ECQSGD(bits=2)).memory
        WeightedError(alpha=0.2, beta=0.9)

    Reference:
        Wu, Huang, Huang and Zhang, "Error Compensated Quantized SGD and its Applications to
        Large-scale Distributed Optimization", ICML 2018.
    """

    default_memory = "weighted_error"

    @classmethod
    def examples(cls) -> tuple[ECQSGD, ...]:
        """The default, and one with few bits."""
        return (cls(), cls(2, 64))
