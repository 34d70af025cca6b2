"""Which instances of compressors and memories tests take."""

import pytest

from lightning_gc import COMPRESSORS, MEMORIES, SCHEMES
from lightning_gc.compressors import Collective, Compressor
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.scheme import fits

ALL: tuple[Compressor, ...] = tuple(c for cls in COMPRESSORS.values() for c in cls.examples())
ONE_EACH: tuple[Compressor, ...] = tuple(cls.examples()[0] for cls in COMPRESSORS.values())
"""Of every class its first example: for tests that take long. The others are for the night."""

ALL_MEMORIES: tuple[Memory, ...] = tuple(m for cls in MEMORIES.values() for m in cls.examples())
ONE_MEMORY_EACH: tuple[Memory, ...] = tuple(cls.examples()[0] for cls in MEMORIES.values())

each_instance = pytest.mark.parametrize(
    "compressor",
    [pytest.param(c, marks=() if c in ONE_EACH else pytest.mark.nightly) for c in ALL],
    ids=cases.label,
)
"""All compressors; by day of every class its first example."""


def schemes_for(compressor: Compressor) -> list[Scheme | None]:
    """Return all schemes that carry the compressor; None alone, if it has rounds of its own."""
    if isinstance(compressor.method, Collective):
        return [None]
    return [cls() for cls in SCHEMES.values() if fits(cls(), compressor)]
