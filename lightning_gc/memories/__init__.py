"""What is remembered between steps, one file per rule."""

from lightning_gc.memories.memory import Memory as Memory
from lightning_gc.memories.none import NoMemory as NoMemory
from lightning_gc.memories.residual import Residual as Residual
from lightning_gc.registry import concrete as _concrete
from lightning_gc.registry import export as _export

MEMORIES = _concrete(globals(), Memory)
"""``{name: class}`` of all memories that have a name."""

_export(globals(), "MEMORIES")
