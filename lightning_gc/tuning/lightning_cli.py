"""LightningCLI that accepts, and ignores, a section ``tune`` in its configuration."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_gc.methods.lightning_flavour import pl

if TYPE_CHECKING:
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
else:
    import importlib

    _cli = importlib.import_module(f"{pl.__name__}.cli")
    LightningCLI, LightningArgumentParser = _cli.LightningCLI, _cli.LightningArgumentParser
import importlib
import json

from jsonargparse import ArgumentParser

import lightning_gc
from lightning_gc.methods import lightning_flavour  # noqa: F401, the strategies are of its package


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


def editor_schema(modules: Sequence[str] = ()) -> dict[str, Any]:
    """Return a schema that says nothing of a file but of its strategy.

    Args:
        modules: with classes of the user's own; they are imported.
    """
    for module in modules:
        importlib.import_module(module)
    parser = ArgumentParser()
    strategies = (
        lightning_gc.CompressedDDPStrategy,
        lightning_gc.CompressedFSDPStrategy,
        lightning_gc.CompressedHSDPStrategy,
        lightning_gc.LocalStepsStrategy,
        lightning_gc.SimulatedDDPStrategy,
        lightning_gc.SimulatedLocalStepsStrategy,
    )
    for strategy in strategies:
        parser.add_subclass_arguments(strategy, strategy.__name__)
    try:
        found = json.loads(parser.get_completion_script("jsonschema"))
    except (AttributeError, ValueError) as error:
        raise ImportError(
            "lightning-gc schema needs jsonargparse 4.53 or later, which writes JSON schemas; "
            "pip install --upgrade 'jsonargparse[signatures]'."
        ) from error
    named = [found["properties"][strategy.__name__] for strategy in strategies]
    either = {"anyOf": [{"type": "string"}, *named]}
    trainer = {"type": "object", "properties": {"strategy": either}}
    return {"type": "object", "properties": {"trainer": trainer}, "$defs": found["$defs"]}
