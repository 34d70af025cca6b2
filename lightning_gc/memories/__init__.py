"""Memories: error feedback and momentum before compression, one rule per file."""

from lightning_gc.core.registry import concrete as _concrete
from lightning_gc.core.registry import export as _export
from lightning_gc.memories.base import Memory as Memory
from lightning_gc.memories.cser import CSER as CSER
from lightning_gc.memories.diana import DIANA as DIANA
from lightning_gc.memories.ef21 import EF21 as EF21
from lightning_gc.memories.error_feedback import ErrorFeedback as ErrorFeedback
from lightning_gc.memories.error_reset import ErrorReset as ErrorReset
from lightning_gc.memories.global_momentum import GlobalMomentum as GlobalMomentum
from lightning_gc.memories.local_momentum import LocalMomentum as LocalMomentum
from lightning_gc.memories.loco import LoCo as LoCo
from lightning_gc.memories.momentum_correction import MomentumCorrection as MomentumCorrection
from lightning_gc.memories.narrow_residual import NarrowResidual as NarrowResidual
from lightning_gc.memories.none import NoMemory as NoMemory
from lightning_gc.memories.saef import SAEF as SAEF
from lightning_gc.memories.step_ahead import StepAhead as StepAhead
from lightning_gc.memories.weighted_error import WeightedError as WeightedError

MEMORIES = _concrete(globals(), Memory)
"""``{name: class}`` of all memories that have a name."""

_export(globals(), "MEMORIES")
