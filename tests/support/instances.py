"""Which instances of compressors and memories tests take."""

from lightning_gc import COMPRESSORS, MEMORIES
from lightning_gc.compressors import Compressor
from lightning_gc.memories import Memory

ALL: tuple[Compressor, ...] = tuple(c for cls in COMPRESSORS.values() for c in cls.examples())
ONE_EACH: tuple[Compressor, ...] = tuple(cls.examples()[0] for cls in COMPRESSORS.values())
"""Of every class its first example: for tests that take long. The others are for the night."""

ALL_MEMORIES: tuple[Memory, ...] = tuple(m for cls in MEMORIES.values() for m in cls.examples())
