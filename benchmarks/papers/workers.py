"""The number of workers at a fixed global batch: does compression hurt more with more of them?

    python benchmarks/papers/workers.py

The thesis expects more workers to cost quality (hypothesis 6), as smaller batches are compressed,
and finds "no strong trend" for 1, 2 and 4 (Figure 5.2).
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, where
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

from lightning_gc import DGC, QSGD, PerParameter, TopK
from lightning_gc.methods import plot_style

COUNTS = (1, 2, 4, 8, 16)
ARMS = {
    "dense": tasks.Method(),
    "Top-k 1 %": tasks.Method(PerParameter(TopK(0.01))),
    "DGC 1 %": tasks.Method(PerParameter(DGC(0.01))),
    "QSGD, 4 bits": tasks.Method(PerParameter(QSGD(4))),
}
# Read off the rankings of benchmarks/papers/rankings.py: DGC's momentum wants a lower rate.
RATES = {"DGC 1 %": 5.0}
ABOUT = """
The thesis expected test performance to fall with more workers (hypothesis 6), as smaller batches
are compressed, and saw "no strong trend" for 1, 2 and 4 (Figure 5.2).

The demo's LSTM with 64 units, one epoch of Python's documentation in 16 columns that the workers
share (so dense is the same algorithm for all, but for its dropout masks), every tensor compressed,
rate 20 (DGC 5), falling in a straight line to zero.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms with all numbers of workers."""
    return [
        {"arm": arm, "workers": workers, "rate": RATES.get(arm, 20.0)}
        | {"epochs": 1, "hidden": 64, "columns": 16, "seed": seed}
        for seed in range(seeds)
        for workers in COUNTS
        for arm in ARMS
    ]


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    return tasks.words(cell, ARMS[cell["arm"]])


def trend(rows: list[Row], arm: str) -> list[float]:
    """Return, per seed, the slope of the loss over log2 W."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        runs = where(rows, arm=arm, seed=seed)
        runs = [row for row in runs if row["loss"] is not None]
        if len(runs) == len(COUNTS):
            xs, ys = [math.log2(r["workers"]) for r in runs], [r["loss"] for r in runs]
            found.append(float(stats.linregress(xs, ys).slope))
    return found


def page(rows: list[Row]) -> str:
    """Return the table."""
    lines = []
    for arm in ARMS:
        losses = [values(where(rows, arm=arm, workers=w), "loss") for w in COUNTS]
        cells_ = [spread(each, ".3f") for each in losses]
        lines.append([arm, *cells_, spread(trend(rows, arm), "+.4f")])
    head = ["validation loss, workers:", *map(str, COUNTS), "per doubling"]
    return table(head, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Say whether a trend over W is there that dense does not have."""
    found = []
    dense = trend(rows, "dense")
    for arm in list(ARMS)[1:]:
        own = trend(rows, arm)
        n = min(len(own), len(dense))
        text = f"no trend over W beyond dense's: {arm}"
        if n > 1:
            low, high = interval([a - b for a, b in zip(own, dense, strict=False)])
            said = f"{low:+.4f} to {high:+.4f} in loss per doubling (95 %)"
            answer = "disagrees" if low > 0 or high < 0 else "agrees: none found"
            found.append(Claim(text, "no trend, W = 1, 2, 4", said, answer))
    return found


def interval(numbers: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean."""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    reach = float(stats.t.ppf(0.975, len(numbers) - 1)) * error
    return statistics.fmean(numbers) - reach, statistics.fmean(numbers) + reach


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss against the number of workers."""
    ax = figure.subplots()
    for arm, colour in zip(ARMS, (plot_style.INK, *plot_style.SERIES), strict=False):
        for row in where(rows, arm=arm):
            if row["loss"] is not None:
                ax.plot(row["workers"], row["loss"], "o", ms=3, color=colour)
        means = [
            statistics.fmean(values(where(rows, arm=arm, workers=w), "loss") or [math.nan])
            for w in COUNTS
        ]
        ax.plot(COUNTS, means, color=colour, label=arm)
    ax.set_xscale("log", base=2)
    ax.set_xticks(COUNTS, [str(count) for count in COUNTS])
    ax.set(xlabel="workers", ylabel="validation loss")
    plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(frame.main(Experiment("workers", ABOUT, cells, train, page, claims, draw)))
