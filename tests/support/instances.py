"""Which instances of compressors and memories tests take."""

import pytest

from lightning_gc import COMPRESSORS, MEMORIES, SCHEMES, Hierarchical, TwoHop
from lightning_gc.compressors import Collective, Compressor
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.scheme import fits

ALL: tuple[Compressor, ...] = tuple(c for cls in COMPRESSORS.values() for c in cls.examples())
FIRST: tuple[Compressor, ...] = tuple(cls.examples()[0] for cls in COMPRESSORS.values())
"""Of every class its first example."""

LATE = {
    *("aqsgd", "atomo_entries", "bin_means", "coded_qsgd", "dynamic_tree", "float8"),
    *("gaussian_k", "lossless", "mxfp4", "mxfp8"),
    *("nonzero_blocks", "nvfp4"),
    *("redsync", "rotated", "signum", "svd_threshold", "variance_criterion"),
}
"""Methods whose contracts are for the night, since those of others have the same code by day.

By day they are compared with NumPy, and their decoders get damaged payloads.
"""

ONE_EACH: tuple[Compressor, ...] = tuple(
    c for name, c in zip(COMPRESSORS, FIRST, strict=True) if name not in LATE
)
"""The others' first examples: for tests that take long. What is not here is for the night."""

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
    # Of so few workers these make no nodes; test_two_hop.py and test_hierarchical.py have some.
    kinds = [cls for cls in SCHEMES.values() if cls not in (TwoHop, Hierarchical)]
    return [cls() for cls in kinds if fits(cls(), compressor)]
