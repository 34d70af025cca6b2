"""Test your own compressors, memories and schemes: simulated workers and contract tests."""

from lightning_gc.core.registry import refuse_misspelt as _refuse_misspelt
from lightning_gc.testing.lockstep import LocalLockstep as LocalLockstep
from lightning_gc.testing.lockstep import LocalRound as LocalRound
from lightning_gc.testing.lockstep import Lockstep as Lockstep
from lightning_gc.testing.lockstep import Round as Round

__all__ = ["LocalLockstep", "LocalRound", "Lockstep", "Round"]
_refuse_misspelt(globals())
