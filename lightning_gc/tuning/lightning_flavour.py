"""The Lightning whose strategies ``lightning_gc`` offers: the one that the program has imported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import lightning_gc

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    _ours = lightning_gc.CompressedDDPStrategy.__module__.rpartition(".for_")[2]
    pl = importlib.import_module({"lightning": "lightning.pytorch"}.get(_ours, _ours))

__all__ = ["pl"]
