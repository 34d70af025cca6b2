"""What benchmarks/papers/heterogeneity.py found: slopes, gaps at equal volume, and a plot."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
from frame import Claim, Row, spread, table, values, verdict, where
from matplotlib.figure import Figure

from lightning_gc.methods import plot_style

BATCH = 16  # samples of a worker, where it does not take all
TOP, HARD, NEAREST, ROUNDING = "Top-k", "hard threshold", "nearest", "absolute rounding"
# Arm -> its levels: densities, bits, or multiples of the mean size of a local gradient's element.
ARMS: dict[str, tuple[float, ...]] = {
    "none": (0,),
    TOP: (0.3, 0.1, 0.03, 0.01),
    HARD: (1, 2.5, 6, 15, 40, 100),
    NEAREST: (2, 3, 4),
    ROUNDING: (0.3, 1.5, 8, 40),
}
ABSOLUTE = {TOP: HARD, NEAREST: ROUNDING}


def at_volume(rows: list[Row], arm: str, volume: float, measure: str, figure: str) -> float:
    """Return an arm's figure at a volume, by a straight line between levels in logarithms."""
    points = sorted((row[measure], row[figure]) for row in where(rows, arm=arm) if row[figure])
    xs, ys = np.log([p[0] for p in points if p[0] > 0]), np.log([p[1] for p in points if p[0] > 0])
    inside = len(xs) and xs[0] <= math.log(volume) <= xs[-1]
    return float(np.exp(np.interp(math.log(volume), xs, ys))) if inside else math.nan


def pairs(rows: list[Row], relative: str, level: float, figure: str, **what: Any) -> list[Row]:
    """Return, per seed, a relative compressor's figure and the absolute one's at equal volume."""
    measure = "density" if relative == TOP else "bits"
    found = []
    for one in where(rows, arm=relative, level=level, **what):
        others = where(rows, seed=one["seed"], **what)
        other = at_volume(others, ABSOLUTE[relative], one[measure], measure, figure)
        if not math.isnan(other) and one[figure] is not None:
            found.append({"relative": one[figure], "absolute": other, "volume": one[measure]})
    return found


def slopes(rows: list[Row], arm: str, figure: str, **what: Any) -> list[float]:
    """Return, per seed, the slope of log figure over log 1/density (Top-k), or over log λ."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        line = [row for row in where(rows, arm=arm, seed=seed, **what) if row[figure]]
        xs = [-math.log(r["level"]) if arm == TOP else math.log(r["level"]) for r in line]
        if len(line) > 2:
            ys = [math.log(r[figure]) for r in line]
            found.append(float(np.polyfit(xs, ys, 1)[0]))
    return found


SETTINGS = [
    (t, b, s) for t in ("a9a", "madelon") for b in ("all", BATCH) for s in ("shuffled", "sorted")
]


def direct(rows: list[Row], relative: str, **what: Any) -> list[float]:
    """Return, per seed, log(absolute gap / relative gap), the mean over volumes in reach."""
    logs = [
        [math.log(p["absolute"] / p["relative"]) for p in points]
        for level in ARMS[relative]
        if (points := pairs(rows, relative, level, "gap", **what))
    ]
    return [statistics.fmean(column) for column in zip(*logs, strict=False)]


def advantage(rows: list[Row], relative: str, **what: Any) -> dict[str, list[float]]:
    """Return, per split and seed, log(absolute gap / relative gap), at volumes that both have."""
    found: dict[str, dict[float, list[float]]] = {}
    for split in ("sorted", "shuffled"):
        each = {v: pairs(rows, relative, v, "gap", split=split, **what) for v in ARMS[relative]}
        found[split] = {
            v: [math.log(p["absolute"] / p["relative"]) for p in some] for v, some in each.items()
        }
    seeds = len({row["seed"] for row in rows})
    full = [v for v in ARMS[relative] if all(len(each[v]) == seeds for each in found.values())]
    return {
        split: [statistics.fmean(each[v][i] for v in full) for i in range(seeds)] if full else []
        for split, each in found.items()
    }


def difference(rows: list[Row], task: str, split: str) -> float:
    """Return D, from runs in which a worker's gradient is of all its samples."""
    runs = where(rows, task=task, split=split, batch="all")
    elements = {"a9a": 123, "madelon": 500}[task]
    return elements * statistics.fmean(row["scale"] ** 2 for row in runs) if runs else math.nan


def page(rows: list[Row]) -> str:
    """Return the tables."""
    text = "D = mean ‖∇f_i(x*)‖² tells how much the workers' data differ:"
    for task in ("a9a", "madelon"):
        apart = [f"{split} {difference(rows, task, split):.2g}" for split in ("shuffled", "sorted")]
        text += f" {task} {', '.join(apart)};"
    text = text[:-1] + ". Sorting by label hardly changes madelon's.\n\n## Slopes\n\n"
    text += "Of log ‖e‖² (mean over steps, units of the update) and of log gap, over log 1/δ for "
    text += "Top-k, over log λ for the threshold.\n\n"
    lines = []
    for task, batch, split in SETTINGS:
        what = {"task": task, "batch": batch, "split": split}
        cells_ = [spread(slopes(rows, a, f, **what)) for a in (TOP, HARD) for f in ("error", "gap")]
        lines.append([task, batch, split, *cells_])
    head = [
        "",
        "samples",
        "split",
        "Top-k, ‖e‖²",
        "Top-k, gap",
        "threshold, ‖e‖²",
        "threshold, gap",
    ]
    text += table(head, lines)
    text += "\n## Gap at equal volume\n\n"
    for relative, absolute in ABSOLUTE.items():
        lines = []
        for task, batch, split in SETTINGS:
            what = {"task": task, "batch": batch, "split": split}
            dense = spread(values(where(rows, arm="none", **what), "gap"), ".1e")
            for level in ARMS[relative]:
                both = pairs(rows, relative, level, "gap", **what)
                ratio = spread([p["absolute"] / p["relative"] for p in both])
                shown = [spread([p[n] for p in both], ".1e") for n in ("relative", "absolute")]
                lines.append([task, batch, split, f"{level:g}", dense, *shown, ratio])
        unit = "density" if relative == TOP else "bits"
        head = ["", "samples", "split", unit, "none", relative, absolute, "absolute / relative"]
        text += table(head, lines) + "\n"
    return text


def claims(rows: list[Row]) -> list[Claim]:
    """Hold the remarks and the conjecture against what was measured."""
    found = []
    for task in ("a9a", "madelon"):
        for batch in ("all", BATCH):
            what = {"task": task, "batch": batch}
            apart, together = (
                slopes(rows, TOP, "error", split=split, **what) for split in ("sorted", "shuffled")
            )
            said = f"sorted {spread(apart)}, shuffled {spread(together)}"
            if batch == "all":  # no sampling noise, so the bounds have no term in 1/δ
                text = f"{task}, all samples: ‖e‖² of Top-k grows like δ^−2 with either split †"
                near = all(abs(slope - 2) < 0.35 for slope in (*apart, *together))
                answer = "agrees (within 0.35)" if near else "disagrees (by more than 0.35)"
                found.append(Claim(text, "δ^−2", said, answer))
            else:
                text = f"{task}, {batch} samples: ‖e‖² of Top-k grows faster where data differ"
                answer = (
                    verdict(together, apart) if task == "a9a" else "cannot be told: D is equal †"
                )
                found.append(Claim(text, "δ^−2 against δ^−1", said, answer))
            apart, together = (
                slopes(rows, HARD, "error", split=split, **what) for split in ("sorted", "shuffled")
            )
            said = f"sorted {spread(apart)}, shuffled {spread(together)}"
            near = all(abs(slope - 2) < 0.2 for slope in (*apart, *together))
            text = f"{task}, {batch}: ‖e‖² under the threshold grows like λ² with either split †"
            answer = "agrees (within 0.2)" if near else "disagrees (by more than 0.2)"
            found.append(Claim(text, "v²", said, answer))
            for relative, absolute in ABSOLUTE.items():
                own = direct(rows, relative, split="sorted", **what)
                text = f"{task}, {batch}, sorted: {absolute} has a smaller gap than {relative}"
                said = f"× {spread([math.exp(v) for v in own])}"
                found.append(Claim(text, "conjectured", said, verdict(own, [0.0] * len(own))))
                logs = advantage(rows, relative, **what)
                said = ", ".join(
                    f"{split} × {spread([math.exp(v) for v in each])}"
                    for split, each in logs.items()
                )
                text = f"{task}, {batch}: {absolute} gains on {relative} where data differ †"
                answer = verdict(logs["sorted"], logs["shuffled"])
                answer = answer if task == "a9a" else "cannot be told: D is equal †"
                found.append(Claim(text, "", said, answer))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw gap against density for each setting."""
    figure.set_size_inches(plot_style.WIDTH, 8.5)
    axes = figure.subplots(4, 2, sharex=True)
    for ax, (task, batch, split) in zip(axes.flatten(), SETTINGS, strict=True):
        for arm, colour in ((TOP, plot_style.SERIES[0]), (HARD, plot_style.SERIES[1])):
            for seed in {row["seed"] for row in rows}:
                what = {"task": task, "batch": batch, "split": split, "arm": arm, "seed": seed}
                line = sorted(
                    (row["density"], row["gap"])
                    for row in where(rows, **what)
                    if row["gap"] and row["density"] > 1e-4
                )
                if line:
                    label = arm if not seed else None
                    ax.plot(*zip(*line, strict=True), ".-", color=colour, lw=0.8, label=label)
        plot_style.plain_log(ax.xaxis)
        plot_style.plain_log(ax.yaxis)
        ax.set_title(f"{task}, {batch},\n{split}")
    plot_style.legend(figure)
    for ax in axes[:, 0]:
        ax.set_ylabel("f − f*")
    for ax in axes[-1]:
        ax.set_xlabel("density")
