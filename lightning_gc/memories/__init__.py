"""What is remembered between steps, one file per rule."""

from lightning_gc.memories.memory import Memory as Memory
from lightning_gc.memories.none import NoMemory as NoMemory
from lightning_gc.memories.residual import Residual as Residual
from lightning_gc.registry import concrete as _concrete
from lightning_gc.registry import public as _public

__all__ = _public(globals())
REGISTRY = _concrete(globals(), Memory)
