"""Testing for authors of compressors, memories and schemes: Lockstep, and contract tests."""

from lightning_gc.testing.lockstep import Lockstep as Lockstep
from lightning_gc.testing.lockstep import Round as Round

__all__ = ["Lockstep", "Round"]
