"""The laws as tests: subclass one class, name your instances, run pytest."""

from lightning_gc.testing.contracts.compressor import CompressorContract as CompressorContract
from lightning_gc.testing.contracts.decoder import DecoderContract as DecoderContract
from lightning_gc.testing.contracts.memory import MemoryContract as MemoryContract
from lightning_gc.testing.contracts.scheme import SchemeContract as SchemeContract

__all__ = ["CompressorContract", "DecoderContract", "MemoryContract", "SchemeContract"]
