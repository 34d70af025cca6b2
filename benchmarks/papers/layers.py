"""Levels by layer: LayerBudget's plans, compared with common levels of as many bytes.

    python benchmarks/papers/layers.py

L-GreCo reports fewer bytes at equal accuracy. Bytes of a plan are not chosen, so loss at its bytes
is read off the line between the common levels.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from pathlib import Path

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_gc import QSGD, PowerSGD, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller, Fixed, LayerBudget
from lightning_gc.methods import plot_style

TASKS: dict[str, Cell] = {
    "words": {"rate": 10.0, "epochs": 5, "hidden": 64, "workers": 2, "columns": 20},
    "digits": {"rate": 0.05, "epochs": 10, "width": 16, "workers": 2, "batch": 16},
}
# Knob -> compressor, common levels in ascending order of bytes, the plans' reference and levels.
KNOBS: dict[str, tuple[Compressor, tuple[float, ...], float, tuple[float, ...]]] = {
    "rank": (PowerSGD(), (1, 2, 3, 4), 4, (1, 2, 3, 4, 6, 8)),
    "bits": (QSGD(), (2, 3, 4, 5), 4, (2, 3, 4, 5, 6, 8)),
    "density": (TopK(), (0.001, 0.003, 0.01, 0.02), 0.01, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)),
}
ABSOLUTE, RELATIVE = "plan", "plan, relative errors"
ENOUGH = 0.85  # of the reference's bytes
ABOUT = f"""
`LayerBudget` makes a plan at the end of each epoch: fewest bytes at the squared error of a common
level, its reference (rank 4, 4 bits, density 1 %). `{RELATIVE}` weighs each parameter's error by
1/‖x‖². Beside them common levels, for the whole run.

*words*: the demo's language model (64 units, 5 epochs of Python's documentation, clipped SGD whose
rate falls in a line to zero). *digits*: the ResNet of examples/vision.py (width 16, 10 epochs,
momentum). 2 simulated workers; memories and schemes are the methods' own; small tensors are dense,
and their bytes count. Rates are those of dense training. *Apart* is the loss minus that of a common
level of as many bytes, read off the line between those that were run (over the logarithm of bytes),
seed by seed; negative is better.
"""


def plans(knob: str) -> dict[str, Controller]:
    """Return what is compared with common levels."""
    _, _, reference, levels = KNOBS[knob]
    return {
        ABSOLUTE: LayerBudget(reference, levels),
        RELATIVE: LayerBudget(reference, levels, relative=True),
    }


def cells(seeds: int) -> list[Cell]:
    """Return all tasks, knobs and arms."""
    arms = [("none", "none")]
    for knob, (_, levels, *_) in KNOBS.items():
        arms += [(knob, f"{level:g}") for level in levels]
        arms += [(knob, name) for name in plans(knob)]
    return [
        {"task": task, "knob": knob, "arm": arm, **TASKS[task], "seed": seed}
        for task in TASKS
        for seed in range(seeds)
        for knob, arm in arms
    ]


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    method = tasks.Method()
    if cell["knob"] != "none":
        planned = plans(cell["knob"]).get(cell["arm"])
        controller = Fixed(float(cell["arm"])) if planned is None else planned
        method = tasks.Method(KNOBS[cell["knob"]][0], None, controller)
    if cell["task"] == "words":
        return tasks.words(cell, method)
    return tasks.photos(cell, method)


def at_equal_bytes(rows: list[Row], run: Row) -> float:
    """Return the loss that a common level would have at this run's bytes; nan outside of them."""
    of_knob = [
        where(rows, task=run["task"], knob=run["knob"], seed=run["seed"], arm=f"{level:g}")
        for level in KNOBS[run["knob"]][1]
    ]
    points = [(math.log(r["bytes"]), values([r], "loss")[0]) for found in of_knob for r in found]
    asked = math.log(run["bytes"])
    for (less, worse), (more, better) in itertools.pairwise(points):
        if less <= asked <= more:
            return worse + (better - worse) * (asked - less) / (more - less)
    return math.nan


def apart(rows: list[Row], runs: list[Row]) -> list[float]:
    """Return the losses minus those at equal bytes, where there is one."""
    others = [at_equal_bytes(rows, run) for run in runs]
    both = zip(values(runs, "loss"), others, strict=True)
    return [ours - other for ours, other in both if math.isfinite(other)]


def share(rows: list[Row], runs: list[Row]) -> list[float]:
    """Return the runs' bytes in units of their reference's, of the same seed."""
    task, knob = runs[0]["task"], runs[0]["knob"]
    reference = where(rows, task=task, knob=knob, arm=f"{KNOBS[knob][2]:g}")
    theirs = {row["seed"]: row["bytes"] for row in reference}
    return [run["bytes"] / theirs[run["seed"]] for run in runs if run["seed"] in theirs]


def page(rows: list[Row]) -> str:
    """Return a table for each task."""
    text = ""
    for task in TASKS:
        lines = []
        for knob in ("none", *KNOBS):
            arms = dict.fromkeys(row["arm"] for row in where(rows, task=task, knob=knob))
            for arm in arms:
                runs = where(rows, task=task, knob=knob, arm=arm)
                planned = knob != "none" and arm in plans(knob)
                lines.append(
                    [
                        knob,
                        arm,
                        f"{statistics.fmean(values(runs, 'bytes')):,.0f}",
                        spread(values(runs, "loss"), ".4f"),
                        spread(apart(rows, runs), "+.4f") if planned else "",
                    ]
                )
        if lines:
            head = ["knob", "level", "bytes per step", "validation loss", "apart"]
            text += f"\n## {task.capitalize()}\n\n{table(head, lines)}"
    return text


def claims(rows: list[Row]) -> list[Claim]:
    """Ask of each plan whether it saves bytes, and whether it beats a common level."""
    found = []
    for task in TASKS:
        for knob in KNOBS:
            for name in plans(knob):
                runs = where(rows, task=task, knob=knob, arm=name)
                reference = where(rows, task=task, knob=knob, arm=f"{KNOBS[knob][2]:g}")
                if min(len(runs), len(reference)) < 2 or not share(rows, runs):
                    continue
                found.append(saves(f"{task}, {knob}, {name}", rows, runs, reference))
                gaps = apart(rows, runs)
                said = verdict(gaps, [0.0] * len(gaps))
                what = f"{task}, {knob}, {name}: better than a common level of as many bytes"
                found.append(Claim(what, "", spread(gaps, "+.4f"), said))
    return found


def saves(what: str, rows: list[Row], runs: list[Row], reference: list[Row]) -> Claim:
    """Ask whether a plan's loss is within a deviation of its reference's, at fewer bytes."""
    bytes_, theirs = statistics.fmean(share(rows, runs)), values(reference, "loss")
    more = statistics.fmean(values(runs, "loss")) - statistics.fmean(theirs)
    equal = more <= statistics.stdev(theirs)
    text = f"{what}: at most {ENOUGH} of the bytes at a loss within a standard deviation"
    ours = f"{bytes_:.2f} of the bytes, loss {more:+.4f} (deviation {statistics.stdev(theirs):.4f})"
    return Claim(text, "", ours, "agrees" if equal and bytes_ <= ENOUGH else "disagrees")


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss against bytes, a panel per task; plans are filled marks."""
    figure.set_size_inches(plot_style.WIDTH, 3 * len(TASKS))
    for ax, task in zip(figure.subplots(len(TASKS), 1), TASKS, strict=True):
        dense = where(rows, task=task, knob="none")
        if dense:
            loss = statistics.fmean(values(dense, "loss"))
            ax.axhline(loss, color=plot_style.MUTED, lw=0.8, label="dense")
        for knob, (compressor, *_) in KNOBS.items():
            colour = plot_style.FAMILIES[compressor.traits.kind]
            common = [
                where(rows, task=task, knob=knob, arm=f"{level:g}") for level in KNOBS[knob][1]
            ]
            _dots(ax, [runs for runs in common if runs], "o-", colour, f"{knob}, common")
            for mark, name in zip("^v", plans(knob), strict=True):
                runs = where(rows, task=task, knob=knob, arm=name)
                _dots(ax, [runs] if runs else [], mark, colour, f"{knob}, {name}")
        plot_style.plain_log(ax.xaxis)
        ax.set(title=task, xlabel="bytes per step and worker", ylabel="validation loss")
    plot_style.legend(figure)


def _dots(ax: Axes, groups: list[list[Row]], how: str, colour: str, label: str) -> None:
    places = [statistics.fmean(values(runs, "bytes")) for runs in groups]
    losses = [statistics.fmean(values(runs, "loss")) for runs in groups]
    face = "none" if how == "o-" else colour
    ax.plot(places, losses, how, ms=6, color=colour, label=label, markerfacecolor=face)


if __name__ == "__main__":
    sys.exit(frame.main(Experiment("layers", ABOUT, cells, train, page, claims, draw)))
