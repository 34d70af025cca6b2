"""Loss against bytes, exchanging every H steps: dense, quantised and sparse differences of weights.

    python benchmarks/papers/local_steps.py

Four workers train a small transformer with AdamW on equally many words, every method at several
learning rates. At H = 1 gradients are exchanged, as in DDP; above, how far weights have come.
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
    QSGD,
    BinMeans,
    ChunkedTopK,
    ErrorFeedback,
    Identity,
    NoMemory,
    OuterSGD,
    Quantised,
    TopK,
)
from lightning_gc.methods import plot_style

WORKERS = 4
RATES = (0.0015, 0.003, 0.006, 0.012, 0.024)
PERIODS = (1, 4, 8, 32, 128)
ARMS = {
    "dense": Arm(Identity()),
    "QSGD(4)": Arm(QSGD(4)),
    "TopK 1 %": Arm(TopK(0.01)),
    "TopK 3 % of 4 bits": Arm(Quantised(TopK(0.03), QSGD(4)), ErrorFeedback(decay=0.95)),
}
OTHERS = {
    "TopK 1 %, no feedback": Arm(TopK(0.01), NoMemory()),
    "dense, DiLoCo's outer step": Arm(Identity(), outer=OuterSGD.diloco()),
    "dense, β₁ = 0": Arm(Identity(), momentum=0.0),
    "QSGD(4), β₁ = 0": Arm(QSGD(4), momentum=0.0),
}
"""At H = 8."""
BINS = "1.6 % of 2 bits, β₁ = 0"
KINDS = [
    *((arm, every) for every in PERIODS for arm in ARMS),
    *((arm, 8) for arm in OTHERS),
    *((BINS, every) for every in (1, 2)),
]
EVERY_ARM = {**ARMS, **OTHERS, BINS: Arm(Quantised(ChunkedTopK(), BinMeans(2)), momentum=0.0)}
"""By name; with which H is in ``KINDS``."""
ABOUT = """
Local SGD and its successors exchange every H steps, and claim as much quality for a fraction of the
bytes. Here four workers train a transformer of two layers, 64 wide, with tied embeddings, on
Python's documentation: AdamW, rate warmed up over 5 % of the steps and falling to zero in a cosine,
640 steps of four rows of 32 words each. At H = 1 gradients are exchanged, and there is one
optimizer; above, differences of weights, and every worker has its own. Gradients are clipped at a
norm of 1: the mean at H = 1, else each worker's. *Loss* is the mean cross-entropy of the common
weights on the validation text. *Bytes* are what one worker would have sent in all, as the simulated
transport counts them. Every line is at its own rate, the best of 0.0015, 0.003, 0.006, 0.012 and
0.024 with the first seed; β₁ is AdamW's 0.9 unless it is named. *TopK 3 % of 4 bits* has
SparseLoCo's form: its feedback forgets 5 % a round. *1.6 % of 2 bits* is `ChunkedTopK()`, 64 of
every 4,096 elements, as means of four bins.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms at all rates."""
    return tuned_rate.cells(({"arm": arm, "every": every} for arm, every in KINDS), RATES, seeds)


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    arm, every = EVERY_ARM[cell["arm"]], cell["every"]
    arm = dataclasses.replace(arm, every=0 if every == 1 else every)
    rate, steps, seed = tuned_rate.rate(cell), cell["steps"], cell["seed"]
    return run(arm, WORKERS, rate=rate, steps=steps, seed=seed)


def best(rows: list[Row], arm: str, every: int) -> list[Row]:
    """Return the runs of an arm at its rate."""
    return tuned_rate.runs(rows, arm=arm, every=every)


def lines(rows: list[Row]) -> list[tuple[str, int, list[Row]]]:
    """Return arm, H and best runs, of those that have been run."""
    found = [(arm, every, best(rows, arm, every)) for arm, every in KINDS]
    return [(arm, every, runs) for arm, every, runs in found if runs]


def page(rows: list[Row]) -> str:
    """Return the table."""
    plain = best(rows, "dense", 1)
    shown = []
    for arm, every, runs in lines(rows):
        edge = " (edge)" if tuned_rate.is_edge(runs[0], RATES) else ""
        less = plain[0]["bytes"] / runs[0]["bytes"] if plain else math.nan
        mb = f"{runs[0]['bytes'] / 1e6:.2f}"
        loss = spread(values(runs, "loss"), ".3f")
        shown.append([arm, every, f"{runs[0]['rate']:g}{edge}", loss, mb, f"{less:.0f}"])
    head = ["sent", "H", "best rate", "validation loss", "MB", "times fewer than plain DDP"]
    return table(head, shown)


def claims(rows: list[Row]) -> list[Claim]:
    """Compare bytes at nearly equal loss, and what feedback is worth."""
    dense = {every: values(best(rows, "dense", every), "loss") for every in PERIODS}
    found = []

    def gap(arm: str, every: int, base: list[float]) -> tuple[list[float], list[float], str]:
        losses = values(best(rows, arm, every), "loss")
        n = min(len(losses), len(base))
        return losses[:n], base[:n], f"{spread(losses, '.3f')} against {spread(base, '.3f')}"

    mine, base, said = gap("TopK 1 %", 8, values(best(rows, "TopK 1 %, no feedback", 8), "loss"))
    text = "sparse differences need error feedback: TopK 1 %, H = 8, with against without"
    found.append(Claim(text, "SparseLoCo", said, verdict(mine, base)))
    mine, base, said = gap("QSGD(4)", 8, dense[8])
    text = "four bits cost nothing beside dense local steps: H = 8 (by the means, 0.03 nats)"
    if mine:
        close = statistics.fmean(mine) <= statistics.fmean(base) + 0.03
        found.append(Claim(text, "Streaming DiLoCo", said, "agrees" if close else "disagrees"))
    for text, times, limit, against in (
        ("240 times fewer bytes within 0.05 nats of dense at the same H", 240, 0.05, 0),
        ("60 times fewer bytes within 0.1 nats of plain DDP", 60, 0.1, 1),
    ):
        plain = best(rows, "dense", 1)
        hits = [
            f"{arm}, H = {every}"
            for arm, every, runs in lines(rows)
            if plain
            and plain[0]["bytes"] >= times * runs[0]["bytes"]
            and (base := dense[against or every])
            and statistics.fmean(values(runs, "loss") or [9e9]) <= statistics.fmean(base) + limit
        ]
        answer = "agrees" if hits else "disagrees"
        found.append(Claim(f"{text} (by the means)", "", "; ".join(hits) or "none", answer))
    mine, base, said = gap("dense, DiLoCo's outer step", 8, dense[8])
    text = "DiLoCo's outer momentum is better than averaging, at H = 8 in 80 rounds"
    found.append(Claim(text, "DiLoCo, long runs", said, verdict(mine, base)))
    return [claim for claim in found if claim.ours]


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss against bytes, a line an arm over H; variants have the method's colour."""
    figure.set_size_inches(plot_style.WIDTH, 5)
    ax = figure.subplots()
    found, shown = lines(rows), []
    families = {"dense": "dense", "QSGD": "quantiser", "TopK": "sparsifier"}
    for arm, mark in zip(EVERY_ARM, plot_style.MARKERS, strict=False):
        points = [(every, runs) for name, every, runs in found if name == arm]
        megabytes = [runs[0]["bytes"] / 1e6 for _, runs in points]
        losses = [statistics.fmean(values(runs, "loss") or [math.nan]) for _, runs in points]
        family = next(family for name, family in families.items() if arm.startswith(name))
        colour = plot_style.SERIES[-2] if "bits" in arm else plot_style.FAMILIES[family]
        ax.plot(megabytes, losses, marker=mark, color=colour, label=arm)
        shown += [(x, y, f"{n}") for (n, _), x, y in zip(points, megabytes, losses, strict=True)]
    plot_style.plain_log(ax.xaxis)
    ax.set(xlabel="MB sent by a worker (numbers: H)", ylabel="validation loss")
    plot_style.legend(figure)
    frame.label_points(ax, shown)


if __name__ == "__main__":
    before = functools.partial(tuned_rate.trials, rates=RATES)
    sys.exit(
        frame.main(
            Experiment("local_steps", ABOUT, cells, train, page, claims, draw, before=before)
        )
    )
