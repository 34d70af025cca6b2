"""Whether ``auto``, permitted to round, trains as well as uncompressed gradients do.

    python benchmarks/papers/auto_quality.py

Four simulated workers on a link of 100 Mbit/s, where it chooses the fewest bits that it may.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import equal_budgets_models
import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values
from matplotlib.figure import Figure

from lightning_gc import QSGD, Cast, NoMemory
from lightning_gc.controllers import Auto
from lightning_gc.methods import plot_style

ARMS = {
    "uncompressed": tasks.Method(network="100mbit"),
    "auto": tasks.Method("auto", controller=Auto(), network="100mbit"),  # type: ignore[arg-type]
}
FIXED: dict[str, tasks.Method] = {
    str(method): tasks.Method(method, NoMemory(), network="100mbit")
    for method in (Cast(), QSGD(8), QSGD(6), QSGD(4))
}
"""What *auto* may choose, for the LSTM, which is the most sensitive one."""
RATES = {
    ("lstm", "sgd"): 28.0,
    ("lstm", "adamw"): 0.003,
    ("lstm", "muon"): 0.01,
    ("resnet", "sgd"): 0.05,
    ("resnet", "adamw"): 0.003,
    ("resnet", "muon"): 0.01,
    ("transformer", "sgd"): 0.3,
    ("transformer", "adamw"): 0.006,
    ("transformer", "muon"): 0.02,
}
"""Learning rates, which suit uncompressed gradients; equal for both arms."""
ABOUT = """
Four simulated workers train three small models with three optimizers, each at one learning rate,
which does not fall. The link of 100 Mbit/s is slow beside these models, so that *auto* chooses the
fewest bits that it may: `QSGD(4)`, and `QSGD(8)` under Muon. Its first steps are uncompressed.

*SGD* has a momentum of 0.9, but none with the LSTM, whose gradients are clipped. *Muon* trains
inner matrices, AdamW at 0.003 all other parameters. A ResNet has one such matrix only, its last
layer. *Loss* is the mean cross-entropy on validation data, mean and standard deviation over seeds.
*Within*: the mean is not above the worst uncompressed seed.

The second table has each method that may be chosen, fixed, as differences to the uncompressed run
of the same seed: mean and standard deviation over seeds.
"""


def cells(seeds: int) -> list[Cell]:
    """Return both arms of every model and optimizer, seed by seed."""
    return [
        {
            "model": model,
            "optimizer": optimizer,
            "arm": arm,
            "rate": rate,
            "workers": 4,
            "seed": seed,
        }
        for seed in range(seeds)
        for (model, optimizer), rate in RATES.items()
        for arm in (*ARMS, *(FIXED if model == "lstm" else ()))
    ]


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    model = equal_budgets_models.MODELS[cell["model"]]
    momentum = 0.0 if cell["model"] == "lstm" else 0.9
    settings = {"width": model.width, "epochs": model.epochs, "momentum": momentum}
    return model.train({**cell, **settings}, (ARMS | FIXED)[cell["arm"]])


def _pairs(rows: list[Row]) -> dict[tuple[str, str], tuple[list[float], list[float], float]]:
    """Return model and optimizer -> losses of both arms, and how many times fewer bytes."""
    found = {}
    for model, optimizer in RATES:
        kind = {"model": model, "optimizer": optimizer}
        dense = frame.where(rows, arm="uncompressed", **kind)
        ours = frame.where(rows, arm="auto", **kind)
        if dense and len(dense) == len(ours):
            ratio = dense[0]["bytes"] / ours[0]["bytes"]
            found[model, optimizer] = values(dense, "loss"), values(ours, "loss"), ratio
    return found


def page(rows: list[Row]) -> str:
    """Return the losses of both arms."""
    lines = [
        [
            *kind,
            *(spread(each, ".3f") for each in (dense, ours)),
            f"{ratio:.1f}",
            "within" if statistics.mean(ours) <= max(dense) else "above",
        ]
        for kind, (dense, ours, ratio) in _pairs(rows).items()
    ]
    head = ["model", "optimizer", "uncompressed", "auto", "times fewer bytes", "spread of seeds"]
    return f"{table(head, lines)}\n{_fixed(rows)}"


def _fixed(rows: list[Row]) -> str:
    """Return what each method, fixed, costs the LSTM."""
    lines = []
    for model, optimizer in RATES:
        kind = {"model": model, "optimizer": optimizer}
        dense = {row["seed"]: row["loss"] for row in frame.where(rows, arm="uncompressed", **kind)}
        apart = [
            [row["loss"] - dense[row["seed"]] for row in frame.where(rows, arm=arm, **kind)]
            for arm in FIXED
        ]
        if all(apart):
            lines.append([model, optimizer, *(spread(each, "+.3f") for each in apart)])
    return table(["model", "optimizer", *FIXED], lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Return nothing: no paper says it."""
    return []


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw each seed's difference to the uncompressed run."""
    axes = figure.subplots()
    pairs = _pairs(rows)
    for place, (dense, ours, _) in enumerate(pairs.values()):
        apart = [b - a for a, b in zip(dense, ours, strict=True)]
        spread_of = [each - statistics.mean(dense) for each in dense]
        axes.plot([place] * len(apart), apart, "o", color=plot_style.SERIES[0])
        axes.plot([place + 0.2] * len(dense), spread_of, "_", color=plot_style.MUTED, ms=10)
    axes.axhline(0, color=plot_style.MUTED, lw=0.8)
    axes.set_xticks(range(len(pairs)), [", ".join(kind) for kind in pairs], rotation=30, ha="right")
    axes.set(ylabel="loss, less that of uncompressed gradients")


if __name__ == "__main__":
    sys.exit(
        frame.main(Experiment("auto_quality", ABOUT, cells, train, page, claims, draw, seeds=3))
    )
