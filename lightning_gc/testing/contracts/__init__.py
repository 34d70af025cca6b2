"""Test your own classes against the laws: subclass a contract, list your instances, run pytest."""

try:
    import hypothesis as _hypothesis  # noqa: F401
    import pytest  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"lightning_gc.testing.contracts needs pytest and hypothesis ({_error}). "
        f"Install the extra: pip install 'lightning-gc[testing]'."
    ) from _error

from lightning_gc.testing.contracts.compressor import CompressorContract as CompressorContract
from lightning_gc.testing.contracts.decoder import DecoderContract as DecoderContract
from lightning_gc.testing.contracts.memory import MemoryContract as MemoryContract
from lightning_gc.testing.contracts.scheme import SchemeContract as SchemeContract

__all__ = ["CompressorContract", "DecoderContract", "MemoryContract", "SchemeContract"]
