"""The thesis's whole protocol, small: 60 random draws of each method, several models and workers.

    python benchmarks/papers/thesis.py --only hidden=48 workers=1      # the medium model alone
    python benchmarks/papers/thesis.py                                 # and five other cells

Cost, from ten runs on one core of a busy machine: with 48 units and one worker 4.7 to 5.7 CPU
seconds an epoch, tests included, so 840 runs take 12 CPU hours at most; runs that stop early, less.
Seven draws of each repetition are 294 runs: 4 hours, and for the other five cells 4 (24 units, also
with W = 2, which was not measured), 6 (96 units), 5 (W = 2) and 7 (W = 4). That is 38 hours in all;
60 draws in all six cells, as in the thesis, would be 87. Draws are run one after the other, each
for all methods, and the page compares those that all methods have: interrupt it when there are
enough.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import frame
import tasks
import thesis_page as page
from frame import Cell, Experiment, Row
from optuna.trial import FixedTrial
from pytorch_lightning import Callback
from shared import hush
from tune_language_model import LanguageModel, Text

from lightning_gc import tuning
from lightning_gc.methods import yaml_config
from lightning_gc.tuning.early_stopping import EarlyStopping
from lightning_gc.tuning.trial import fit

CONFIG = tasks.ROOT / "configs" / "thesis.yaml"  # whose methods and ranges these are
SECTIONS = yaml_config.read(CONFIG)
METHODS = yaml_config.methods_in(SECTIONS)
RANGES = {**SECTIONS["tune"]["space"], "memory.momentum": {"low": 0.1, "high": 0.9}}
# Units and workers -> draws of each repetition. The thesis has as many in all six.
DRAWS = {(48, 1): 20, (48, 2): 7, (48, 4): 7, (24, 1): 7, (24, 2): 7, (96, 1): 7}
ABOUT = """
Thesis, Figures 5.2 to 5.10 and B.1 to B.6: orderings, not values; its 13 methods, and Random-k
without feedback. Its LSTM with 48 units (medium),
24 (small) and 96 (large) on Python's documentation, 20 columns that the workers share, 99 steps an
epoch; methods, norms and ranges of `configs/thesis.yaml`: rate drawn from 1 to 50, constant in a
run, dropout from 0 to 0.8, DGC's momentum from 0.1 to 0.9, every tensor compressed, clipped at 0.25
after averaging; at most 10 epochs, a run stops after 2 without an improvement (thesis: 50 and 10).

The thesis draws 60 settings once. Here a seed is a repetition of the search with weights and draws
of its own, the same for all methods: 20 draws for the medium model and one worker (60 in sum), 7
for the others. Of each repetition the draw with the best validation perplexity is tested once, at
its best epoch; the thesis chose on the test text. Where cells are compared, all have the draws that
the smallest one has.
"""


class TrainLoss(Callback):
    """Keeps the mean training loss of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._sum, self._count = 0.0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Add one worker's loss, which Lightning has divided by the accumulated batches."""
        self._sum += float(outputs["loss"]) * trainer.accumulate_grad_batches
        self._count += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        """Close the epoch."""
        self.epochs.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0


def cells(seeds: int) -> list[Cell]:
    """Return all draws of all methods, so that those that are done are of all methods."""
    shared = {"epochs": 10, "patience": 2, "columns": 20}
    return [
        {"method": method, "draw": draw, "hidden": hidden, "workers": workers, **shared}
        | {"seed": seed}
        for (hidden, workers), draws in DRAWS.items()
        for draw in range(draws)
        for seed in range(seeds)
        for method in METHODS
    ]


def drawn(cell: Cell) -> dict[str, float]:
    """Return a draw's settings: uniform, and the same for all methods, models and workers."""
    source = random.Random(f"{cell['seed']} {cell['draw']}")
    return {name: source.uniform(ends["low"], ends["high"]) for name, ends in RANGES.items()}


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell, as ``lightning-gc tune`` runs a trial."""
    hush()
    method, settings, losses = METHODS[cell["method"]], drawn(cell), TrainLoss()
    rate, dropout = settings["model.learning_rate"], settings["model.dropout"]

    def build(trial: Any) -> tuple[Any, ...]:
        model = LanguageModel(cell["hidden"], rate, dropout)
        return model, Text(data, cell["columns"]), {"callbacks": [losses]}

    rules = tuning.Experiment(
        "thesis",
        build,
        metric="validation_perplexity",
        test_metric="test_perplexity",
        patience=cell["patience"],
        workers=cell["workers"],
        trainer={
            "accelerator": "cpu",
            "max_epochs": cell["epochs"],
            "gradient_clip_val": tasks.CLIP,
            "num_sanity_val_steps": 0,
        },
    )
    stopping = EarlyStopping(rules, method)
    test = fit(rules, method, FixedTrial(settings), stopping.update, cell["seed"], final=True)
    record = stopping.record()
    return {
        "validation": min(filter(math.isfinite, stopping.curve), default=math.inf),
        "test": test,
        "rate": rate,
        "dropout": dropout,
        "momentum": settings["memory.momentum"] if method.tuned_memory else None,
        "best_epoch": record["best_epoch"] + 1,
        "epochs_run": record["epochs"],
        "course": [value if math.isfinite(value) else None for value in stopping.curve],
        "train_course": [value if math.isfinite(value) else None for value in losses.epochs],
        "encoding_ratio": record["encoding_ratio"],
        "cpu_seconds": sum(stopping.cpu_seconds) / len(stopping.cpu_seconds),
    }


if __name__ == "__main__":
    sys.exit(
        frame.main(Experiment("thesis", ABOUT, cells, train, page.page, page.claims, page.draw))
    )
