"""Local steps whose exchanges arrive late: how much a delay costs, by how sparse the exchange is.

    python benchmarks/papers/local_delay.py

Four workers, H = 8; training goes on for so many steps until a result is taken over (``rebase``).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import frame
import tasks  # noqa: F401 - sets the path
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict
from matplotlib.figure import Figure
from transformer_runs import Arm, run

from lightning_gc import QSGD, Identity, TopK
from lightning_gc.methods import plot_style

RATES = (0.003, 0.006, 0.012)
DELAYS = (0, 1, 4)
ARMS = {
    "dense": Arm(Identity(), every=8),
    "QSGD(4)": Arm(QSGD(4), every=8),
    "TopK 3 %": Arm(TopK(0.03), every=8),
    "TopK 1 %": Arm(TopK(0.01), every=8),
    "TopK 0.3 %": Arm(TopK(0.003), every=8),
}
ABOUT = """
With a delay of τ steps workers go on training while an exchange is under way; its result is added
to the weights τ steps after they were sent (`merge="rebase"`). How much does that cost, and does it
cost more where the exchange is sparse? The transformer of `local_steps.py`: four workers, AdamW
each, 640 steps, an exchange of weights every 8; validation loss of the common weights. Every line
and delay is at its own rate, the best of 0.003, 0.006 and 0.012 with the first seed.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms at all delays."""
    kinds = ({"arm": arm, "delay": delay} for arm in ARMS for delay in DELAYS)
    return tuned_rate.cells(kinds, RATES, seeds)


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    arm = dataclasses.replace(ARMS[cell["arm"]], delay=cell["delay"])
    return run(arm, 4, rate=tuned_rate.rate(cell), steps=cell["steps"], seed=cell["seed"])


def page(rows: list[Row]) -> str:
    """Return the table: arms by delays."""
    lines = []
    for arm in ARMS:
        found = [tuned_rate.runs(rows, arm=arm, delay=delay) for delay in DELAYS]
        shown = [f"{spread(values(r, 'loss'), '.3f')} at {r[0]['rate']:g}" for r in found if r]
        lines.append([arm, *shown, *[""] * (len(DELAYS) - len(shown))])
    return table(["sent", *(f"delay {delay}" for delay in DELAYS)], lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Compare each delay with none, and four steps of it between dense and sparse."""
    found = []
    for arm in ARMS:
        late, none = (tuned_rate.runs(rows, arm=arm, delay=delay) for delay in (4, 0))
        n = min(len(late), len(none))
        if n > 1:
            mine, base = values(late[:n], "loss"), values(none[:n], "loss")
            cost = statistics.fmean(mine) - statistics.fmean(base)
            said = f"{spread(mine, '.3f')} against {spread(base, '.3f')}: {cost:+.3f}"
            found.append(
                Claim(f"{arm}: a delay of 4 steps costs loss", "", said, verdict(base, mine))
            )
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss over delay, a line an arm."""
    ax = figure.subplots()
    for arm, colour in zip(ARMS, plot_style.SERIES, strict=False):
        found = [(delay, tuned_rate.runs(rows, arm=arm, delay=delay)) for delay in DELAYS]
        points = [(delay, values(runs, "loss")) for delay, runs in found if runs]
        if points:
            means = [statistics.fmean(losses) for _, losses in points]
            spans = [max(losses) - min(losses) for _, losses in points]
            delays = [delay for delay, _ in points]
            ax.errorbar(delays, means, [s / 2 for s in spans], marker="o", color=colour, label=arm)
    ax.set(xlabel="delay, steps", ylabel="validation loss", xticks=DELAYS)
    plot_style.legend(figure)


if __name__ == "__main__":
    before = functools.partial(tuned_rate.trials, rates=RATES)
    sys.exit(
        frame.main(
            Experiment("local_delay", ABOUT, cells, train, page, claims, draw, before=before)
        )
    )
