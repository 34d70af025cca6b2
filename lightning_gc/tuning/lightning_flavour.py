"""``pl``: the Lightning package that the program uses, see ``lightning_gc.flavours``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_gc import flavours

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = importlib.import_module(flavours.lightning())

__all__ = ["pl"]
