"""What the examples have in common: little chatter, options, and a check at the end."""

from __future__ import annotations

import argparse
import logging
import warnings
from dataclasses import field, fields
from typing import Any

import pytorch_lightning as pl
import torch
from torch.nn.utils import parameters_to_vector


def hush() -> None:
    """Leave results in the terminal, and what is worth reading."""
    for package in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    unread = (".*is deprecated", ".*not have many workers", ".*than the logging interval")
    for message in unread:
        warnings.filterwarnings("ignore", message=message)


def option(default: Any, meaning: str) -> Any:
    """Return a field of a dataclass of settings, which is also an option on the command line."""
    return field(default=default, metadata={"help": f"{meaning} (default: {default})"})


def command_line(usage: str | None, settings: type) -> argparse.ArgumentParser:
    """Return a parser with an option for every field that `option` has made."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", description=usage)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for f in fields(settings):
        flag = "--" + f.name.replace("_", "-")
        parser.add_argument(
            flag, type=type(f.default), default=f.default, help=f.metadata.get("help")
        )
    return parser


def check_replicas(trainer: pl.Trainer, module: pl.LightningModule, name: str) -> None:
    """Hold all replicas against worker 0's, bit for bit.

    Raises:
        RuntimeError: they differ.
    """
    weights = parameters_to_vector(module.parameters()).detach()
    strategy: Any = trainer.strategy
    same = torch.equal(weights, strategy.broadcast(weights))
    if not strategy.reduce_boolean_decision(same):
        raise RuntimeError(f"{name}: the workers' weights differ after training.")
