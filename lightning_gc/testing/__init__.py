"""For authors of compressors, memories and schemes: run them, and hold them to their laws."""

from lightning_gc.testing.lockstep import Lockstep as Lockstep
from lightning_gc.testing.lockstep import Round as Round

__all__ = ["Lockstep", "Round"]
