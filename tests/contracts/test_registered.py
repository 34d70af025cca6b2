"""Every registered compressor, memory and scheme, held to its laws."""

import pytest

from lightning_gc import COMPRESSORS, MEMORIES, SCHEMES
from lightning_gc.compressors import PerParameter, SizeSwitch, TopK
from lightning_gc.testing.contracts import (
    CompressorContract,
    DecoderContract,
    MemoryContract,
    SchemeContract,
)


class TestCompressors(CompressorContract):
    instances = tuple(c for cls in COMPRESSORS.values() for c in cls.examples())
    workers = (1, 3)  # 1 to 4, with every memory and scheme: test_combinations.py


@pytest.mark.nightly
@pytest.mark.timeout(900)
class TestDecodersAtLength(DecoderContract):
    instances = TestCompressors.instances
    examples = 10_000
    repeatable = False


class TestWrappers(CompressorContract):
    instances = (
        SizeSwitch(TopK(0.1), min_numel=100),
        SizeSwitch(TopK(0.1), min_numel=0, min_dims=0),
        PerParameter(SizeSwitch(TopK(0.1))),
    )


class TestMemories(MemoryContract):
    instances = tuple(m for cls in MEMORIES.values() for m in cls.examples())


class TestSchemes(SchemeContract):
    instances = tuple(cls() for cls in SCHEMES.values())
