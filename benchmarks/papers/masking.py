"""DGC's momentum masking as in its paper, as the thesis words it, and none: the docs LSTM.

    python benchmarks/papers/masking.py --jobs 2

The thesis supposes (§5.2) that DGC falls behind Top-k at 5000x as too many updates are masked.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Literal

import frame
import tasks
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict
from matplotlib.figure import Figure

from lightning_gc import DGC, MomentumCorrection, PerParameter, TopK
from lightning_gc.methods import plot_style

MOMENTUM = 0.5
TOP_K, SENT, TEXT, NONE = "Top-k", "DGC", "DGC, the thesis's text", "DGC, no masking"
MASKINGS: dict[str, Literal["sent", "sampled", "none"]] = {
    SENT: "sent",
    TEXT: "sampled",
    NONE: "none",
}
PAIRS = (
    ("DGC is worse than Top-k", "at 5000x only", TOP_K, SENT),
    ("... since updates are masked: it is better without", "supposed", NONE, SENT),
    ("masked as the thesis's text has it, DGC is worse", "not run", SENT, TEXT),
)
RATES = (5.0, 10.0, 20.0, 40.0)
DENSITIES = (0.01, 0.001, 0.0001)
ABOUT = """
The demo's LSTM with 64 units, dropout 0.3, two epochs of Python's documentation (396 steps), two
workers, every tensor compressed by the exact k largest, gradients clipped at a norm of 0.25 after
they have been averaged, learning rates falling in a straight line to zero. DGC has a momentum of
0.5, Top-k has none. Each arm at each density has the best of four rates, 5 to 40, with seed 0;
other seeds are run at that.

*Sent* masks momentum where something was sent, as the paper and the authors' code do; the thesis's
text where the velocity exceeds the least magnitude of a 1 % sample of it.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms at all densities; seed 0 chooses the rate."""
    shared = {"epochs": 2, "hidden": 64, "columns": 10, "workers": 2}
    kinds = [
        {"arm": arm, "density": density, **shared}
        for density in DENSITIES
        for arm in (TOP_K, *MASKINGS)
    ]
    return tuned_rate.cells(kinds, RATES, seeds)


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    method = tasks.Method(PerParameter(TopK(cell["density"])))
    if cell["arm"] != TOP_K:
        memory = MomentumCorrection(MOMENTUM, masking=MASKINGS[cell["arm"]])
        method = tasks.Method(PerParameter(DGC(cell["density"], selection="exact")), memory)
    found = tasks.words({**cell, "rate": tuned_rate.rate(cell)}, method, data)
    found["sent"] = found.pop("density")
    return found


def losses_of(rows: list[Row], arm: str, density: float) -> list[float]:
    """Return the validation losses of an arm at its rate."""
    return values(tuned_rate.runs(rows, arm=arm, density=density), "loss")


def page(rows: list[Row]) -> str:
    """Return the table."""
    lines = []
    for density in DENSITIES:
        for arm in (TOP_K, *MASKINGS):
            if runs := tuned_rate.runs(rows, arm=arm, density=density):
                edge = " (an end)" if tuned_rate.is_edge(runs[0], RATES) else ""
                rate = f"{runs[0]['rate']:g}{edge}"
                lines.append([f"{density:g}", arm, rate, spread(values(runs, "loss"), ".3f")])
    return table(["density", "", "rate", "validation loss"], lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Hold what the thesis supposes against ours."""
    found = []
    for density, ratio in zip(DENSITIES, ("50x", "500x", "5000x"), strict=True):
        for text, theirs, *arms in PAIRS:
            low, high = (losses_of(rows, arm, density) for arm in arms)
            n = min(len(low), len(high))
            if n:
                said = f"{spread(low[:n], '.3f')} against {spread(high[:n], '.3f')}"
                found.append(Claim(f"{text}; {ratio}", theirs, said, verdict(low[:n], high[:n])))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the losses of each arm over densities."""
    ax = figure.subplots()
    for arm, colour in zip((TOP_K, *MASKINGS), plot_style.SERIES, strict=False):
        places, means = [], []
        for column, density in enumerate(DENSITIES):
            losses = losses_of(rows, arm, density)
            ax.plot([column] * len(losses), losses, "o", ms=4, alpha=0.6, color=colour)
            if losses:
                places.append(column)
                means.append(statistics.fmean(losses))
        ax.plot(places, means, color=colour, label=arm)
    ax.set_xticks(range(len(DENSITIES)), [f"{100 * density:g} %" for density in DENSITIES])
    ax.set(xlabel="density", ylabel="validation loss")
    plot_style.legend(figure)
    ax.grid(visible=False, axis="x")


if __name__ == "__main__":
    before = functools.partial(tuned_rate.trials, rates=RATES)
    sys.exit(
        frame.main(Experiment("masking", ABOUT, cells, train, page, claims, draw, before=before))
    )
