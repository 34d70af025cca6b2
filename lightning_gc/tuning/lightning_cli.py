"""LightningCLI that accepts, and ignores, a section ``tune`` in its configuration."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_gc.tuning.lightning_flavour import pl

if TYPE_CHECKING:
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
else:
    import importlib

    _cli = importlib.import_module(f"{pl.__name__}.cli")
    LightningCLI, LightningArgumentParser = _cli.LightningCLI, _cli.LightningArgumentParser


class FitCLI(LightningCLI):
    """LightningCLI that ignores the section ``tune``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section."""
        parser.add_argument("--tune", type=Any, help="what lightning-gc tune reads")


def run(words: Sequence[str]) -> None:
    """Run LightningCLI with these arguments."""
    # It warns as they are not those of the process.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    FitCLI(args=list(words), save_config_kwargs={"overwrite": True})
