"""DGC: TopK with a sampled threshold and momentum correction."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from lightning_gc.compressors.sparsifiers.topk import TopK
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.compressors.wrappers.wrapper import Preset


@dataclass(frozen=True)
class DGC(Preset, DensitySparsifier):  # type: ignore[override]
    """Deep Gradient Compression: ``TopK(selection="sampled")`` of each worker's velocity.

    Its default memory is ``MomentumCorrection(momentum=0.9)``, which replaces the optimizer's
    momentum and weight decay: use plain SGD.

    Where it differs from what is said of the method:

    - Warm-up: the paper raises the compression over four epochs, ``Schedule.dgc_warmup``. Others
      retell it as a smaller learning rate, which is the optimizer's. Neither is on by default.
    - Clipping is off by default. ``MomentumCorrection(clip=c)`` clips each parameter's local
      gradient by itself, not the whole model's.
    - Threshold: estimated from 1 % of a tensor, but from 65,536 elements where that is more, or as
      many as hold 256 of those sent. 80 to 100 % of the density is sent, never more.
    - Masking: momentum is set to zero where something was sent, as in the paper. Some retell it as
      where v is above the least magnitude of a 1 % sample, which is nearly everywhere:
      ``MomentumCorrection(masking="sampled")``. None at all is ``masking="none"``.
    - Small and 1-D tensors go dense by default, as in the authors' code: ``SizeSwitch``.

    Args:
        density: share of elements sent at most, in (0, 1]. Lower means more compression.
        value_dtype: as ``TopK``'s.
        selection: as ``TopK``'s.

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
    value_dtype: Literal["float32", "bfloat16"] = "float32"
    selection: Literal["exact", "sampled"] = "sampled"

    memory_name = "momentum_correction"

    @functools.cached_property
    def inner(self) -> TopK:
        return TopK(self.density, self.value_dtype, self.selection)
