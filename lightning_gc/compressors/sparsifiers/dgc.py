"""Top-k with a sampled threshold, for momentum that is corrected before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gc.compressors.sparsifiers.topk import TopK


@dataclass(frozen=True)
class DGC(TopK):
    """Deep Gradient Compression: ``TopK(selection="sampled")`` of each worker's velocity.

    It is a name for two things that belong together: this compressor, and the memory that goes
    with it unless another is chosen, ``MomentumCorrection(momentum=0.9)``. The paper raises the
    compression over four epochs: ``controller=Schedule.dgc_warmup(final=0.001)``. Use plain SGD
    without momentum and weight decay; the memory has both.

    Args:
        density: share of elements sent at most, in (0, 1]. Lower means more compression.
        value_dtype: as ``TopK``'s.
        selection: as ``TopK``'s.

    Wire format:
        As that of ``TopK``: at most k values and their coded positions, ragged.

    Raises:
        ValueError: as ``TopK``.

    Example:
        >>> from lightning_gc import DGC, CompressedDDPStrategy
        >>> from lightning_gc.controllers import Schedule
        >>> warmup = Schedule.dgc_warmup(final=0.001)
        >>> CompressedDDPStrategy(DGC(), controller=warmup).memory.momentum
        0.9

    Reference:
        Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication
        Bandwidth for Distributed Training", ICLR 2018.
    """

    density: float = 0.001
    selection: Literal["exact", "sampled"] = "sampled"

    default_memory = "momentum_correction"

    @classmethod
    def examples(cls) -> tuple[DGC, ...]:
        """One that has something to send of a small tensor."""
        return (cls(0.1),)
