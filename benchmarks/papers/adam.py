"""Compressed gradients under AdamW: which methods train a small transformer, and with which β₁.

    python benchmarks/papers/adam.py

Two or four workers; every method at several learning rates, with AdamW's momentum and without.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
from pathlib import Path

import frame
import tasks  # noqa: F401 - sets the path
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict
from matplotlib.figure import Figure
from transformer_runs import Arm, run

from lightning_gc import (
    EF21,
    QSGD,
    BinMeans,
    Cast,
    ChunkedTopK,
    EFSignSGD,
    Identity,
    MomentumCorrection,
    PowerSGD,
    Quantised,
    TopK,
)
from lightning_gc.methods import plot_style

RATES = (0.0015, 0.003, 0.006, 0.012)
MOMENTA = (0.9, 0.0)
DENSE = "dense"
ARMS = {
    DENSE: Arm(Identity()),
    "Cast()": Arm(Cast()),
    "QSGD(4)": Arm(QSGD(4)),
    "QSGD(2)": Arm(QSGD(2)),
    "PowerSGD(4)": Arm(PowerSGD(4)),
    "PowerSGD(1)": Arm(PowerSGD(1)),
    "EFSignSGD()": Arm(EFSignSGD()),
    "TopK(0.01)": Arm(TopK(0.01)),
    "TopK(0.003)": Arm(TopK(0.003)),
    "ChunkedTopK, BinMeans(2)": Arm(Quantised(ChunkedTopK(), BinMeans(2))),
    "TopK(0.01), 10 % of the steps dense": Arm(TopK(0.01), dense=0.1),
    "TopK(0.01), EF21": Arm(TopK(0.01), EF21()),
    "weights every 8 steps, QSGD(4)": Arm(QSGD(4), every=8),
    "weights every 4 steps, TopK(0.01)": Arm(TopK(0.01), every=4),
}
"""With both momenta."""
CORRECTED = {
    "TopK(0.01), MomentumCorrection": Arm(TopK(0.01), MomentumCorrection(0.9)),
}
"""The memory has the momentum, so β₁ = 0."""
FEW = (DENSE, "QSGD(4)", "PowerSGD(1)", "TopK(0.01)", "TopK(0.01), MomentumCorrection")
"""With two workers."""
ABOUT = """
Adam divides by the gradient's size, element by element, and most methods were published for SGD.
Here two and four workers train a transformer of two layers, 64 wide, with tied embeddings, on
Python's documentation: AdamW (β₂ = 0.999), rate warmed up over 5 % of 640 steps and falling to zero
in a cosine, four rows of 32 words for each worker and step, the mean gradient clipped at a norm
of 1. *Loss* is the mean cross-entropy on the validation text; *ratio* is how many times fewer bytes
a worker sends than dense, in all. Every line is at its own rate, the best of 0.0015, 0.003, 0.006
and 0.012 with the first seed; β₁ = 0.9 is AdamW's default, β₁ = 0 leaves only the division. With
`MomentumCorrection` the momentum of 0.9 is in the memory, before compression. In the lines of
weights each worker has its own AdamW, and weights are exchanged.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms at both momenta and all rates, four workers first."""
    kinds = [(4, arm, momentum) for arm in ARMS for momentum in MOMENTA]
    kinds += [(4, arm, 0.0) for arm in CORRECTED]
    kinds += [(2, arm, m) for arm in FEW for m in (MOMENTA if arm in ARMS else (0.0,))]
    named = ({"arm": arm, "workers": w, "momentum": momentum} for w, arm, momentum in kinds)
    return tuned_rate.cells(named, RATES, seeds)


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    arm = dataclasses.replace((ARMS | CORRECTED)[cell["arm"]], momentum=cell["momentum"])
    rate, steps, seed = tuned_rate.rate(cell), cell["steps"], cell["seed"]
    return run(arm, cell["workers"], rate=rate, steps=steps, seed=seed)


def page(rows: list[Row]) -> str:
    """Return a table for each number of workers."""
    text = ""
    for workers in sorted({row["workers"] for row in rows}, reverse=True):
        plain = tuned_rate.runs(rows, workers=workers, arm=DENSE, momentum=0.9)
        shown = []
        for arm in ARMS | CORRECTED:
            line, ratio = [arm], math.nan
            for momentum in MOMENTA:
                runs = tuned_rate.runs(rows, workers=workers, arm=arm, momentum=momentum)
                if not runs:
                    line += ["", ""]
                    continue
                edge = " (edge)" if tuned_rate.is_edge(runs[0], RATES) else ""
                line += [spread(values(runs, "loss"), ".3f"), f"{runs[0]['rate']:g}{edge}"]
                ratio = plain[0]["bytes"] / runs[0]["bytes"] if plain else math.nan
            if not math.isnan(ratio):
                shown.append([*line, f"{ratio:.0f}"])
        head = ["sent", "loss, β₁ = 0.9", "best rate", "loss, β₁ = 0", "best rate", "ratio"]
        text += f"**{workers} workers**\n\n{table(head, shown)}\n"
    return text


def claims(rows: list[Row]) -> list[Claim]:
    """Compare momenta, for each method, and methods with dense."""
    found = []

    def compare(text: str, one: list[Row], other: list[Row]) -> None:
        n = min(len(one), len(other))
        mine, base = values(one[:n], "loss"), values(other[:n], "loss")
        if n > 1:
            said = f"{spread(mine, '.3f')} against {spread(base, '.3f')}"
            found.append(Claim(text, "", said, verdict(mine, base)))

    for arm in ("TopK(0.01)", "PowerSGD(1)", "EFSignSGD()", "QSGD(4)", DENSE):
        kind = {"workers": 4, "arm": arm}
        without, usual = (
            tuned_rate.runs(rows, momentum=momentum, **kind) for momentum in (0.0, 0.9)
        )
        compare(f"{arm}: better with β₁ = 0 than with β₁ = 0.9", without, usual)
    plain = tuned_rate.runs(rows, workers=4, arm=DENSE, momentum=0.9)
    compare(
        "TopK(0.01) with β₁ = 0 is better than dense with AdamW's defaults",
        tuned_rate.runs(rows, workers=4, arm="TopK(0.01)", momentum=0.0),
        plain,
    )
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw a row per method with four workers: its loss with β₁ = 0.9 and with 0."""
    figure.set_size_inches(plot_style.WIDTH, 6.6)
    ax = figure.subplots()
    plain = tuned_rate.runs(rows, workers=4, arm=DENSE, momentum=0.9)
    if not plain:
        return
    losses: dict[tuple[float, str], dict[float, float]] = {}  # by ratio and name
    for arm in ARMS | CORRECTED:
        for momentum in MOMENTA:
            runs = tuned_rate.runs(rows, workers=4, arm=arm, momentum=momentum)
            if runs and values(runs, "loss"):
                key = (plain[0]["bytes"] / runs[0]["bytes"], arm)
                losses.setdefault(key, {})[momentum] = statistics.fmean(values(runs, "loss"))
    order = sorted(losses)
    for place, key in enumerate(order):
        ends = list(losses[key].values())
        ax.plot(ends, [place] * len(ends), color=plot_style.MUTED, linewidth=1, zorder=1)
    for momentum, mark, colour in zip(MOMENTA, "so", plot_style.SERIES[1::-1], strict=False):
        shown = [(losses[k][momentum], i) for i, k in enumerate(order) if momentum in losses[k]]
        ax.plot(*zip(*shown, strict=True), mark, color=colour, label=f"β₁ = {momentum:g}")
    dense = statistics.fmean(values(plain, "loss"))
    ax.axvline(dense, color=plot_style.MUTED, linestyle="--", linewidth=1, zorder=0)
    names = [f"{arm.replace(', ', f',{chr(10)}', 1)}, {ratio:.0f}x" for ratio, arm in order]
    ax.set_yticks(range(len(order)), names)
    ax.invert_yaxis()
    ax.set(title="Methods by times fewer bytes", xlabel="validation loss")
    plot_style.legend(figure)


if __name__ == "__main__":
    before = functools.partial(tuned_rate.trials, rates=RATES)
    sys.exit(frame.main(Experiment("adam", ABOUT, cells, train, page, claims, draw, before=before)))
