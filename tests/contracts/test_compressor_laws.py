"""Every registered compressor keeps the laws of compressors."""

import pytest

from lightning_gc.compressors import Menu, PerParameter, SizeSwitch, TopK
from lightning_gc.testing.contracts import CompressorContract, DecoderContract
from tests.support.instances import ALL, FIRST, ONE_EACH


class TestCompressors(CompressorContract):
    instances = ONE_EACH
    examples = 15
    crowds = (2,)


class TestOtherDecoders(DecoderContract):
    instances = tuple(c for c in FIRST if c not in ONE_EACH)
    examples = 15


@pytest.mark.nightly
class TestAllCompressors(CompressorContract):
    instances = ALL


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
