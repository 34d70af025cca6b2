"""A JSON schema of ``trainer.strategy`` in LightningCLI's files, for completion in editors."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser

import lightning_gc
from lightning_gc.tuning import lightning_flavour  # noqa: F401, the strategies are of its package


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
