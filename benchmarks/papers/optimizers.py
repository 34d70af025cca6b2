"""Which optimizers bear which compression, and what momentum before compression brings.

    pip install schedulefree pytorch-optimizer                                  # for three of them
    python benchmarks/papers/optimizers.py --only part=momentum                 # EF21(momentum)
    python benchmarks/papers/optimizers.py --only part=table optimizer=muon     # some of the table
    python benchmarks/papers/optimizers.py                                      # what is missing

Four simulated workers. Every method under every optimizer has a learning rate of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import frame
import tasks  # noqa: F401 - sets the path
import torch
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict
from matplotlib.figure import Figure
from torch.optim import Optimizer
from transformer import Transformer
from transformer_runs import Arm, run

from lightning_gc import (
    EF21,
    QSGD,
    BinMeans,
    ChunkedTopK,
    Identity,
    NarrowResidual,
    PowerSGD,
    Quantised,
    Residual,
    Together,
    TopK,
)
from lightning_gc.core import plot_style

DENSE = "dense"
BINS = Quantised(ChunkedTopK(), BinMeans(2))
TABLE = {
    DENSE: Arm(Identity()),
    "QSGD(6)": Arm(QSGD(6)),
    "QSGD(4)": Arm(QSGD(4)),
    "PowerSGD(4)": Arm(PowerSGD(4)),
    "TopK(0.01)": Arm(TopK(0.01)),
    "2-bit chunks": Arm(BINS),
    "H = 8": Arm(Identity(), every=8),
    "H = 8, QSGD(4)": Arm(QSGD(4), every=8),
    "H = 8, QSGD(2) with errors": Arm(QSGD(2), Residual(), every=8),
    "H = 32": Arm(Identity(), every=32),
    "H = 32, QSGD(4)": Arm(QSGD(4), every=32),
    "H = 32, QSGD(2) with errors": Arm(QSGD(2), Residual(), every=32),
}
"""Gradients in each step, and weights every H steps."""
MOMENTUM = {
    DENSE: (Arm(Identity()), (True, False)),
    "Residual()": (Arm(TopK(0.01), Residual()), (True, False)),
    "NarrowResidual()": (Arm(TopK(0.01), NarrowResidual()), (True, False)),
    "EF21()": (Arm(TopK(0.01), EF21()), (True, False)),
    "EF21(momentum=0.1)": (Arm(TopK(0.01), EF21(0.1)), (True, False)),
    "EF21(momentum=0.3)": (Arm(TopK(0.01), EF21(0.3)), (False,)),
    "Residual(), 10 %": (Arm(TopK(0.1), Residual()), (False,)),
    "EF21(), 10 %": (Arm(TopK(0.1), EF21()), (False,)),
    "EF21(momentum=0.1), 10 %": (Arm(TopK(0.1), EF21(0.1)), (False,)),
}
"""Memories of ``TopK(0.01)`` and ``TopK(0.1)``, and whether the optimizer has momentum."""
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (0.0015, 0.003, 0.006),
    "muon": (0.005, 0.01, 0.02),
    "sgd": (0.1, 0.3, 1.0),
    "lion": (0.0003, 0.001, 0.003),
    "schedule-free": (0.003, 0.006, 0.012),
    "soap": (0.0015, 0.003, 0.006),
}
ALONE = {"schedule-free"}
"""Optimizers whose local steps would need an exchange of the averaged weights: not run."""
ABOUT = """
Four simulated workers train a transformer of two layers, 64 wide, with tied embeddings, on Python's
documentation. Each worker has four rows of 32 words in a step. The rate is warmed up over 5 % of
the steps and falls to zero in a cosine; a schedule-free rate does not fall. The mean gradient is
clipped at a norm of 1. *Loss* is the mean cross-entropy on the validation text. *Ratio* is how many
times fewer bytes a worker sends than dense. Every line is at its own rate, the best of three with
the first seed.

AdamW and Lion have their defaults, SGD a momentum of 0.9. Muon (momentum 0.95, Nesterov,
`match_rms_adamw`) trains the matrices of the blocks, AdamW at 0.003 all other parameters. SOAP
and Lion are pytorch-optimizer's, the schedule-free AdamW is schedulefree's.
"""


def muon(momentum: float, model: Transformer, rate: float) -> Optimizer:
    """Return Muon for the blocks' matrices and AdamW for other parameters, as one optimizer."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and name.startswith("blocks")]
    others = [p for name, p in named if p.ndim != 2 or not name.startswith("blocks")]
    own = torch.optim.Muon(
        matrices,
        lr=rate,
        weight_decay=0.01,
        momentum=momentum,
        nesterov=momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )
    first = 0.9 if momentum else 0.0
    return Together([own, torch.optim.AdamW(others, 0.003, betas=(first, 0.999))])


def make(kind: str, momentum: bool, model: Transformer, rate: float) -> Optimizer:
    """Return an optimizer of the model's parameters."""
    params: list[Any] = list(model.parameters())
    if kind == "muon":
        return muon(0.95 if momentum else 0.0, model, rate)
    if kind == "adamw":
        return torch.optim.AdamW(params, rate, betas=(0.9 if momentum else 0.0, 0.999))
    if kind == "sgd":
        return torch.optim.SGD(params, rate, momentum=0.9)
    if kind == "schedule-free":
        from schedulefree import AdamWScheduleFree  # type: ignore[import-not-found]

        found: Optimizer = AdamWScheduleFree(params, rate)
        found.train()  # type: ignore[attr-defined]
        return found
    import pytorch_optimizer  # type: ignore[import-not-found]

    made: Optimizer = getattr(pytorch_optimizer, {"lion": "Lion", "soap": "SOAP"}[kind])(
        params, rate
    )
    return made


def cells(seeds: int) -> list[Cell]:
    """Return the memories of part "momentum", then all optimizers of part "table"."""
    found = []
    for optimizer in ("adamw", "muon"):
        kinds = [
            {"part": "momentum", "optimizer": optimizer, "arm": arm, "momentum": inner}
            for arm, (_, momenta) in MOMENTUM.items()
            for inner in momenta
        ]
        rates = RATES[optimizer][1:]
        found += [{**cell, "steps": 320} for cell in tuned_rate.cells(kinds, rates, seeds)]
    for optimizer, rates in RATES.items():
        kinds = [
            {"part": "table", "optimizer": optimizer, "arm": arm, "momentum": True}
            for arm, each in TABLE.items()
            if not (each.every and optimizer in ALONE)
        ]
        found += tuned_rate.cells(kinds, rates, seeds)
    return sorted(found, key=lambda cell: (cell["part"] == "table", cell["seed"]))


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    rates = RATES[cell["optimizer"]][cell["part"] == "momentum" :]
    return tuned_rate.trials(cell, rates)


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    arm = TABLE[cell["arm"]] if cell["part"] == "table" else MOMENTUM[cell["arm"]][0]
    arm = dataclasses.replace(
        arm, make=functools.partial(make, cell["optimizer"], cell["momentum"])
    )
    return run(arm, 4, rate=tuned_rate.rate(cell), steps=cell["steps"], seed=cell["seed"])


def page(rows: list[Row]) -> str:
    """Return a table for each part: methods by optimizers."""
    text = ""
    kinds = [name for name in RATES if tuned_rate.runs(rows, part="table", optimizer=name)]
    if kinds:
        lines = []
        for arm in TABLE:
            line, ratio = [arm], math.nan
            for kind in kinds:
                runs = tuned_rate.runs(rows, part="table", optimizer=kind, arm=arm)
                line.append(_cell(runs, RATES[kind]))
                dense = tuned_rate.runs(rows, part="table", optimizer=kind, arm=DENSE)
                if runs and dense:
                    ratio = dense[0]["bytes"] / runs[0]["bytes"]
            lines.append([*line, "–" if math.isnan(ratio) else f"{ratio:.0f}"])
        text += f"**Optimizers, 640 steps**\n\n{table(['sent', *kinds, 'ratio'], lines)}\n"
    lines = []
    for optimizer in ("adamw", "muon"):
        for arm, (_, momenta) in MOMENTUM.items():
            shown = {}
            for inner in momenta:
                runs = tuned_rate.runs(
                    rows, part="momentum", optimizer=optimizer, arm=arm, momentum=inner
                )
                shown[inner] = _cell(runs, RATES[optimizer][1:])
            lines.append([optimizer, arm, shown.get(True, ""), shown.get(False, "")])
    head = ["optimizer", "`TopK`, 1 %, with", "its momentum", "without"]
    return f"{text}**Momentum before compression, 320 steps**\n\n{table(head, lines)}\n"


def _cell(runs: list[Row], rates: tuple[float, ...]) -> str:
    """Return the loss over seeds, and the chosen rate; an asterisk marks a rate at the edge."""
    if not runs:
        return ""
    edge = "*" if tuned_rate.is_edge(runs[0], rates) else ""
    return f"{spread(values(runs, 'loss'), '.3f')} at {runs[0]['rate']:g}{edge}"


def claims(rows: list[Row]) -> list[Claim]:
    """Compare memories, and what two bits cost between local steps."""
    found = []

    def compare(text: str, one: list[Row], other: list[Row]) -> None:
        n = min(len(one), len(other))
        mine, base = values(one[:n], "loss"), values(other[:n], "loss")
        if n > 1:
            said = f"{spread(mine, '.3f')} against {spread(base, '.3f')}"
            found.append(Claim(text, "", said, verdict(mine, base)))

    for optimizer in ("adamw", "muon"):
        kind = {"part": "momentum", "optimizer": optimizer}
        mine = tuned_rate.runs(rows, arm="EF21(momentum=0.1)", momentum=False, **kind)
        for arm in ("EF21()", "Residual()", "NarrowResidual()"):
            for inner in (True, False):
                other = tuned_rate.runs(rows, arm=arm, momentum=inner, **kind)
                its = "with its momentum" if inner else "without momentum"
                text = f"{optimizer}: EF21(momentum=0.1) is better than {arm}, {its}"
                compare(text, mine, other)
    for optimizer in ("muon", "adamw"):
        for steps in (8, 32):
            kind = {"part": "table", "optimizer": optimizer}
            two = tuned_rate.runs(rows, arm=f"H = {steps}, QSGD(2) with errors", **kind)
            whole = tuned_rate.runs(rows, arm=f"H = {steps}", **kind)
            compare(f"{optimizer}: two bits cost something at H = {steps}", whole, two)
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the losses of methods, a colour an optimizer."""
    figure.set_size_inches(plot_style.WIDTH, 6.6)
    ax = figure.subplots()
    for index, optimizer in enumerate(RATES):
        found = [
            (tuned_rate.runs(rows, part="table", optimizer=optimizer, arm=arm), place)
            for place, arm in enumerate(TABLE)
        ]
        points = [(loss, place) for runs, place in found for loss in values(runs, "loss")]
        if points:
            colour = plot_style.SERIES[index % len(plot_style.SERIES)]
            ax.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.8, label=optimizer)
    ax.set_yticks(range(len(TABLE)), list(TABLE))
    ax.invert_yaxis()
    ax.set(xlabel="validation loss")
    if ax.has_data():
        plot_style.legend(figure)


if __name__ == "__main__":
    parts = (ABOUT, cells, train, page, claims, draw)
    sys.exit(frame.main(Experiment("optimizers", *parts, before=before)))
