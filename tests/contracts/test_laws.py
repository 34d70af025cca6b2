"""Every registered compressor, memory and scheme keeps the laws of its kind."""

import pytest

from lightning_gc import SCHEMES, Hierarchical, TwoHop
from lightning_gc.compressors import Menu, PerParameter, SizeSwitch, TopK
from lightning_gc.testing.contracts import (
    CompressorContract,
    DecoderContract,
    MemoryContract,
    SchemeContract,
)
from tests.support.instances import ALL, ALL_MEMORIES, FIRST, ONE_EACH, ONE_MEMORY_EACH


class TestCompressors(CompressorContract):
    instances = ONE_EACH
    examples = 15


class TestOtherDecoders(DecoderContract):
    instances = tuple(c for c in FIRST if c not in ONE_EACH)
    examples = 15


@pytest.mark.nightly
class TestAllCompressors(CompressorContract):
    instances = tuple(c for c in ALL if c not in ONE_EACH)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
class TestDecodersAtLength(DecoderContract):
    instances = ALL
    examples = 16_000  # a million in one night, others in the next
    repeatable = False


class TestWrappers(CompressorContract):
    instances = (
        SizeSwitch(TopK(0.1), min_numel=100),
        SizeSwitch(TopK(0.1), min_numel=0, min_dims=0),
        PerParameter(SizeSwitch(TopK(0.1))),
        *Menu.examples(),
    )


class TestMemories(MemoryContract):
    instances = ONE_MEMORY_EACH


@pytest.mark.nightly
class TestAllMemories(MemoryContract):
    instances = tuple(m for m in ALL_MEMORIES if m not in ONE_MEMORY_EACH)


class TestSchemes(SchemeContract):
    instances = tuple(
        cls(2) if issubclass(cls, TwoHop | Hierarchical) else cls() for cls in SCHEMES.values()
    )
