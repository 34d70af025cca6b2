"""Paper 003's table in its own terms: quantisers of 4 to 16 bits, static, dynamic and reversed.

    python benchmarks/papers/bit_width.py

The paper names neither quantiser nor thresholds. Most likely is rounding to the nearest level of
one scale per tensor, without error feedback; thresholds are DynamicBitWidth's defaults.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.figure import Figure

from lightning_gc import AllGather, ErrorFeedback, NoMemory, PerParameter, Uniform
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Accordion, Controller, DynamicBitWidth, Schedule
from lightning_gc.memories import Memory
from lightning_gc.methods import plot_style

WHOLE = 1 << 24  # block size: one scale per tensor


def nearest(bits: int) -> Compressor:
    """Return the quantiser that the paper most likely has."""
    return PerParameter(Uniform(bits, block_size=WHOLE))


def method(
    compressor: Compressor, memory: Memory | None = None, controller: Controller | None = None
) -> tasks.Method:
    """Return what gathers messages, so that nothing is rounded twice."""
    return tasks.Method(compressor, memory or NoMemory(), controller, AllGather())


NONE, STATIC, FED, DYNAMIC, REVERSE = (
    "none",
    "8 bits, nearest",
    "8 bits, nearest, feedback",
    "dynamic, 4 to 16",
    "reverse, 16 to 4",
)
RANDOM, ACCORDION = "QSGD, 8 bits", "Accordion, 16 and 4"
SAME, FOUR, EQUAL = "constant 9", "constant 4", "constant, dynamic's mean"
ARMS = {
    NONE: tasks.Method(),
    STATIC: method(nearest(8)),
    FED: method(nearest(8), ErrorFeedback()),
    RANDOM: method(PerParameter(Uniform(8, "stochastic", WHOLE))),
    DYNAMIC: method(nearest(4), controller=DynamicBitWidth()),
    REVERSE: method(nearest(16), controller=Schedule((16, 8, 4), by="progress")),
    SAME: method(nearest(9)),
    FOUR: method(nearest(4)),
    "constant 4, feedback": method(nearest(4), ErrorFeedback()),
    ACCORDION: method(nearest(4), controller=Accordion(16, 4, interval=2)),
}
THEIRS = {NONE: 92.96, STATIC: 85.97, DYNAMIC: 91.40}
SETTINGS = {"width": 16, "epochs": 10, "batch": 16, "rate": 0.05, "workers": 2}
ABOUT = """
Paper 003, Table I: ResNet on CIFAR-10, two workers, 70 epochs: 92.96 % without compression, 85.97 %
with 8 bits throughout, 91.40 % with 4 to 16 bits as accuracy grows.

Scaled down: the ResNet of examples/vision.py on scikit-learn's digits (width 16, 10 epochs); two
simulated workers, every tensor compressed with one scale each, no error feedback unless it is
named, messages gathered. `reverse` is 16, 8 and 4 bits in thirds of the run, `constant 9` their
mean. `constant, dynamic's mean` has in every epoch the mean bits of the dynamic run of the same
seed, to the nearest whole number (an epoch without compression counts as 32; more than 16 are not
possible). `cifar.py` has *dynamic bits* on CIFAR-10, by `QSGD`.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms."""
    return [
        {"arm": arm, "task": "digits", **SETTINGS, "seed": seed}
        for seed in range(seeds)
        for arm in (*ARMS, EQUAL)
    ]


def before(cell: Cell) -> list[Cell]:
    """Return the dynamic run whose mean bits are the constant."""
    return [{**cell, "arm": DYNAMIC}] if cell["arm"] == EQUAL else []


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    if cell["arm"] == EQUAL:
        bits = min(round(bits_over_time(cell["before"][0])), 16)
        return tasks.photos(cell, method(nearest(bits)))
    return tasks.photos(cell, ARMS[cell["arm"]])


def bits_over_time(row: Row) -> float:
    """Return the mean bits over epochs, 32 where compression was released."""
    bits = [32 if level is None else level for level in row["levels"]]
    return statistics.fmean(bits) if any(bits) else 32.0


def page(rows: list[Row]) -> str:
    """Return the table."""
    lines = []
    for arm in (*ARMS, EQUAL):
        if runs := where(rows, arm=arm):
            best = [max(row["course"]) for row in runs]
            lines.append(
                [
                    arm,
                    f"{THEIRS.get(arm, '–')}",
                    spread(values(runs, "accuracy"), ".2f", 100),
                    spread(best, ".2f", 100),
                    spread(values(runs, "loss"), ".4f"),
                    spread([bits_over_time(row) for row in runs], ".1f"),
                    spread(values(runs, "ratio"), ".2f"),
                ]
            )
    head = ["", "paper 003, %", "accuracy, %", "best epoch, %", "loss", "mean bits", "ratio"]
    return table(head, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Hold the table's differences against ours."""
    pairs = (
        ("8 bits throughout lose accuracy", "−6.99 points", STATIC, NONE),
        ("error feedback mends that", "not run", STATIC, FED),
        ("dynamic is better than static 8 bits", "+5.43 points", STATIC, DYNAMIC),
        ("dynamic loses a little", "−1.56 points", DYNAMIC, NONE),
        ("few bits first beat few bits last", "not run", REVERSE, DYNAMIC),
        ("dynamic beats a constant 9 bits", "not run", SAME, DYNAMIC),
        ("dynamic beats a constant at its own mean bits", "not run", EQUAL, DYNAMIC),
        ("4 bits throughout lose accuracy", "not run", FOUR, NONE),
        ("8 bits rounded at random lose accuracy", "not run", RANDOM, NONE),
        ("Accordion on bits loses accuracy", "not run", ACCORDION, NONE),
    )
    found = []
    for text, theirs, low, high in pairs:
        less, more = (
            [100 * x for x in values(where(rows, arm=arm), "accuracy")] for arm in (low, high)
        )
        n = min(len(less), len(more))
        if n:
            apart = spread([b - a for a, b in zip(less, more, strict=False)], "+.2f")
            said = f"{high} − {low}: {apart} points"
            found.append(Claim(text, theirs, said, verdict(less[:n], more[:n])))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw accuracy and bits over epochs, means over seeds."""
    figure.set_size_inches(plot_style.WIDTH, 6.5)
    above, below = figure.subplots(2, 1, sharex=True)
    shown = (NONE, STATIC, DYNAMIC, REVERSE, FOUR, ACCORDION)
    for arm, colour in zip(shown, (plot_style.INK, *plot_style.SERIES), strict=False):
        runs = where(rows, arm=arm)
        if not runs:
            continue
        epochs = range(1, len(runs[0]["course"]) + 1)
        mean = [100 * statistics.fmean(x) for x in zip(*(r["course"] for r in runs), strict=True)]
        above.plot(epochs, mean, color=colour, label=arm, lw=1.2)
        levels = [[32 if v is None else v for v in r["levels"]] for r in runs]
        bits = [statistics.fmean(x) or 32 for x in zip(*levels, strict=True)]
        below.step(epochs, bits, color=colour, where="mid", lw=1.2)
    above.set(ylabel="validation accuracy, %")
    below.set(xlabel="epoch", ylabel="bits")
    plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(
        frame.main(Experiment("bit_width", ABOUT, cells, train, page, claims, draw, before=before))
    )
