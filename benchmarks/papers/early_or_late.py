"""Compress early or late, at equal bytes: levels that rise, fall, or stay.

    python benchmarks/papers/early_or_late.py

Paper 003 compresses hardest at first and less as accuracy grows; ACCORDION, to which paper 004
compares, compresses least at first, in the critical regime. Nobody has run both at equal bytes.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.figure import Figure

from lightning_gc import AllGather, NoMemory, PerParameter, TopK, Uniform
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller, Fixed, Schedule
from lightning_gc.methods import plot_style

# Knob -> the compressor, and levels of five equal parts of the run, hardest compression first.
KNOBS: dict[str, tuple[Compressor, tuple[float, ...]]] = {
    "4 to 16 bits": (Uniform(4, "stochastic"), (4, 7, 10, 13, 16)),
    "2 to 6 bits": (Uniform(2, "stochastic"), (2, 3, 4, 5, 6)),
    "2 to 6 bits, nearest, no feedback": (Uniform(2), (2, 3, 4, 5, 6)),
    "Top-k, 0.1 to 10 %": (TopK(0.01), (0.001, 0.003, 0.01, 0.03, 0.1)),
    "Top-k, 0.01 to 1 %": (TopK(0.01), (0.0001, 0.0003, 0.001, 0.003, 0.01)),
}
WAYS = {"late": "least compressed at the end", "early": "at the beginning", "constant": "constant"}
ABOUT = """
Paper 003 sends few bits at first and more as accuracy grows; ACCORDION, to which paper 004
compares, sends most at first, in the critical regime. Here the same five levels in equal parts of a
run, hard compression first (*late*: bytes are spent late) or last (*early*), beside a constant
level at the mean of the five: equal bytes.

The ResNet of examples/vision.py (width 16) on scikit-learn's digits, 10 epochs, 2 workers, batches
of 16, SGD with momentum at 0.05 whose rate falls tenfold after 60 and 85 % of the run. Messages
are gathered, so that nothing is compressed twice. Quantisers are stochastic (QSGD) or take the
nearest level, both without feedback and with small tensors dense; Top-k has feedback and compresses
every tensor. *Loss* is on 599 validation images after the last epoch.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all knobs, each in three ways, and dense."""
    shared = {"rate": 0.05, "epochs": 10, "width": 16, "workers": 2, "batch": 16}
    arms = [("none", "constant"), *((knob, way) for knob in KNOBS for way in WAYS)]
    return [
        {"knob": knob, "way": way, **shared, "seed": seed}
        for seed in range(seeds)
        for knob, way in arms
    ]


def method(knob: str, way: str) -> tasks.Method:
    """Return compressor and controller."""
    if knob == "none":
        return tasks.Method()
    compressor, levels = KNOBS[knob]
    order = {"late": levels, "early": levels[::-1]}
    controller: Controller = Fixed(statistics.fmean(levels))
    if way in order:
        controller = Schedule(order[way], by="progress")
    memory = NoMemory() if "no feedback" in knob else None
    every_tensor = PerParameter(compressor) if knob.startswith("Top-k") else compressor
    return tasks.Method(every_tensor, memory, controller, AllGather())


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    return tasks.photos(cell, method(cell["knob"], cell["way"]))


def page(rows: list[Row]) -> str:
    """Return the table."""
    lines = []
    for knob in ("none", *KNOBS):
        for way in WAYS:
            if runs := where(rows, knob=knob, way=way):
                lines.append(
                    [
                        knob,
                        way,
                        spread(values(runs, "loss"), ".4f"),
                        spread(values(runs, "accuracy"), ".2f", 100),
                        f"{statistics.fmean(values(runs, 'bytes')):,.0f}",
                        spread(values(runs, "total_error_update"), ".3g"),
                    ]
                )
    head = ["levels", "bytes are spent", "loss", "accuracy, %", "bytes per step", "Σγ²‖e‖²"]
    return table(head, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Ask who is right, knob by knob."""
    found = []
    for knob in KNOBS:
        early, late, constant = (
            values(where(rows, knob=knob, way=way), "loss") for way in ("early", "late", "constant")
        )
        n = min(map(len, (early, late, constant)))
        if n:
            ours = f"early {spread(early, '.4f')}, late {spread(late, '.4f')}"
            ours += f", constant {spread(constant, '.4f')}"
            for text, first, other in (
                ("003: late beats early", late, early),
                ("ACCORDION: early beats late", early, late),
                ("either: the better of both beats a constant", best(early, late), constant),
            ):
                said = verdict(first[:n], other[:n])
                found.append(Claim(f"{text}; {knob}", "", ours, said))
    return found


def best(early: list[float], late: list[float]) -> list[float]:
    """Return the losses of the way that is better on average."""
    means = [statistics.fmean(x) if all(map(math.isfinite, x)) else math.inf for x in (early, late)]
    return early if means[0] < means[1] else late


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw losses, a column per knob."""
    ax = figure.subplots()
    dense = values(where(rows, knob="none"), "loss")
    ax.axhline(statistics.fmean(dense), color=plot_style.MUTED, lw=0.8, label="none")
    for way, colour in zip(WAYS, plot_style.SERIES, strict=False):
        for column, knob in enumerate(KNOBS):
            losses = values(where(rows, knob=knob, way=way), "loss")
            place = column + 0.2 * (list(WAYS).index(way) - 1)
            label = f"spent {way}" if way != "constant" and not column else way
            ax.plot([place] * len(losses), losses, "o", ms=4, color=colour, alpha=0.6)
            mean = statistics.fmean(losses) if losses else math.nan
            ax.plot(
                [place - 0.08, place + 0.08],
                [mean] * 2,
                color=colour,
                label=None if column else label,
            )
    ax.set_xticks(range(len(KNOBS)), [k.replace(", ", ",\n") for k in KNOBS])
    plot_style.plain_log(ax.yaxis)
    ax.set(ylabel="validation loss")
    plot_style.legend(figure)
    ax.grid(visible=False, axis="x")


if __name__ == "__main__":
    experiment = Experiment("early_or_late", ABOUT, cells, train, page, claims, draw, seeds=5)
    sys.exit(frame.main(experiment))
