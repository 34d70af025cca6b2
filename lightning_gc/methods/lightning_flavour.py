"""Import the Lightning package that the program uses as ``pl``; see ``lightning_gc.flavours``."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING

from lightning_gc import flavours

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    pl = importlib.import_module(flavours.lightning())

__all__ = ["pl", "quiet_libraries"]


def quiet_libraries() -> None:
    """Silence routine messages of Lightning, Optuna and our trials.

    Call it after the import of Optuna, which sets its own log level.
    """
    for package in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "optuna"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for unread in (
        ".*is deprecated",
        r".* is experimental \(supported from v",
        ".*not have many workers",
        ".*than the logging interval",
        "One worker: nothing is sent",  # the report shows this and the next one
        "This sends .* times what plain",
    ):
        warnings.filterwarnings("ignore", message=unread)
