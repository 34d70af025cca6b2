"""Gradient compression inside PyTorch Lightning's DDP."""

from __future__ import annotations

import importlib as _importlib
import importlib.util as _util
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from lightning_gc.compressors import *
from lightning_gc.memories import *
from lightning_gc.network_model import NetworkModel as NetworkModel
from lightning_gc.registry import export as _export
from lightning_gc.schemes import *

if _TYPE_CHECKING:
    from lightning_gc.strategies.for_pytorch_lightning import (
        CompressedDDPStrategy as CompressedDDPStrategy,
    )
    from lightning_gc.strategies.for_pytorch_lightning import (
        CompressionMonitor as CompressionMonitor,
    )
    from lightning_gc.strategies.for_pytorch_lightning import (
        SimulatedDDPStrategy as SimulatedDDPStrategy,
    )

__version__ = "0.1.0"
_export(
    globals(),
    "COMPRESSORS",
    "MEMORIES",
    "SCHEMES",
    "CompressedDDPStrategy",
    "CompressionMonitor",
    "NetworkModel",
    "SimulatedDDPStrategy",
)

_FLAVOURS = {
    "pytorch_lightning": "lightning_gc.strategies.for_pytorch_lightning",
    "lightning.pytorch": "lightning_gc.strategies.for_lightning",
}


def _loaded() -> list[str]:
    return [flavour for flavour in _FLAVOURS if flavour in _sys.modules]


def _installed() -> list[str]:
    return [flavour for flavour in _FLAVOURS if _util.find_spec(flavour.partition(".")[0])]


if not _TYPE_CHECKING:  # type checkers are to see a misspelt name

    def __getattr__(name: str) -> _Any:
        """Resolve what depends on the flavour of Lightning that the program uses."""
        if name in ("CompressedDDPStrategy", "CompressionMonitor", "SimulatedDDPStrategy"):
            flavour = (_loaded() or _installed())[0]
            return getattr(_importlib.import_module(_FLAVOURS[flavour]), name)
        raise AttributeError(f"module 'lightning_gc' has no attribute {name!r}")


# Strategy names are known once they are registered, and Lightning offers no entry point for that.
# A flavour that nobody has imported yet is imported only if there is no other.
for _flavour in _loaded() or _installed()[:1]:
    _importlib.import_module(_FLAVOURS[_flavour])
