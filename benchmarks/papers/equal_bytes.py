"""Compare a hard threshold with TopK, chunks in bins and QSGD, at equal bytes per step.

    python benchmarks/papers/equal_bytes.py
    python benchmarks/papers/equal_bytes.py --only 'as="TopK(0.01)"'    # one amount of bytes

A threshold sends the elements that matter most, and fewer of them do as well. But its messages have
lengths of their own, each with its elements' number, so the same elements take more bytes.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import equal_budgets_models
import frame
import tasks
import tuned_rate
from frame import Cell, Claim, Experiment, Row, interval, spread, table, values, verdict
from matplotlib.figure import Figure
from total_error import matched

from lightning_gc import QSGD, BinMeans, ChunkedTopK, HardThreshold, PerParameter, Quantised, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import TotalErrorBudget
from lightning_gc.methods import plot_style

WORKERS = 4
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of what suits the model without compression
MODELS = {"lstm": "LSTM", "resnet": "ResNet"}
SUITS = {"lstm": 28.0, "resnet": 0.05}
NEAR = {"lstm": 0.003, "resnet": 0.1}  # thresholds that send about 1 % of the elements
AS: dict[str, Compressor] = {
    "TopK(0.01)": TopK(0.01),
    "QSGD(4)": QSGD(4),
    "TopK(0.001)": TopK(0.001),
}
"""Amounts of bytes: those that these methods send."""
DENSE, TOPK, CHUNKS, QUANTISED = "dense", "TopK", "chunks in bins", "QSGD"
HARD, BUDGET = "HardThreshold", "TotalErrorBudget"
THRESHOLDS, OTHERS = (HARD, BUDGET), (TOPK, CHUNKS, QUANTISED)
NO_BYTES = "any"  # of dense runs


@dataclass(frozen=True)
class Arm:
    """A method whose level is moved until it sends so many bytes.

    Attributes:
        method: of a level.
        start: the level to begin with, from the model and TopK's density of as many bytes.
        slope: of bytes over levels, in logarithms.
        known: whether all steps send as much, so that one tells.
    """

    method: Callable[[float], tasks.Method]
    start: Callable[[str, float], float]
    slope: float
    known: bool


def _every(compressor: Compressor) -> tasks.Method:
    return tasks.Method(PerParameter(compressor))


def _chunks(level: float) -> tasks.Method:
    return _every(Quantised(ChunkedTopK(min(level, 1.0)), BinMeans(2)))


def _budget(level: float) -> tasks.Method:
    return replace(_every(HardThreshold()), controller=TotalErrorBudget(min(level, 1.0)))


ARMS = {
    TOPK: Arm(lambda level: _every(TopK(level)), lambda _, d: d, 1.0, known=True),
    CHUNKS: Arm(_chunks, lambda _, d: min(4 * d, 0.5), 1.0, known=True),
    HARD: Arm(
        lambda level: _every(HardThreshold(level)),
        lambda model, d: NEAR[model] * (0.01 / d) ** 0.6,
        -1.5,
        known=False,
    ),
    BUDGET: Arm(_budget, lambda _, d: d, 1.0, known=False),
}
ABOUT = """
Four simulated workers train two models, each method at equal bytes per step and worker (within
1 %, in the mean over steps and workers). The amounts are those of `TopK(0.01)`, `QSGD(4)` and
`TopK(0.001)`. The LSTM of 64 units reads Python's documentation (248 steps, clipped SGD), the
ResNet of width 16 scikit-learn's digits (144 steps, SGD with momentum 0.9). Every tensor is
compressed, and memories and schemes are the methods' own.

The levels of `HardThreshold` and of `TotalErrorBudget` are found in hindsight: the run is repeated
with other levels until its bytes fit. *Chunks in bins* is `Quantised(ChunkedTopK(density),
BinMeans(2))`. QSGD has whole bits, so it is only in the amount that is its own. Every line is at
its best of five learning rates, chosen with the first seed. *Apart*: the loss less that of `TopK`,
paired by seed, with the 95 % interval (Student's t).
"""


def cells(seeds: int) -> list[Cell]:
    """Return all methods for each amount of bytes, and dense."""
    found = []
    for name in (*AS, NO_BYTES):
        arms = (DENSE,) if name == NO_BYTES else tuple(ARMS)
        arms += (QUANTISED,) if name.startswith("QSGD") else ()
        for model in SUITS:
            kinds = [{"model": model, "as": name, "arm": arm, "workers": WORKERS} for arm in arms]
            found += tuned_rate.cells(kinds, RATES, seeds)
    return found


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell: once, or until the bytes are right."""
    rate = tuned_rate.rate(cell)
    first = cell.get("before", ())
    level = min(first, key=lambda row: abs(row["rate"] - rate))["level"] if first else None
    found = _trained(cell | {"rate": rate}, level)
    kept = ("loss", "accuracy", "diverged", "bytes", "ratio", "density", "total_error_update")
    return {name: found[name] for name in (*kept, "level", "tries") if name in found}


def _trained(cell: Cell, level: float | None) -> Row:
    arm = ARMS.get(cell["arm"])
    if arm is None:
        method = tasks.Method() if cell["arm"] == DENSE else _every(AS[cell["as"]])
        return _run(cell, method) | {"level": None}
    target = _bytes_of(cell["model"], PerParameter(AS[cell["as"]]))
    if level is None:
        level = arm.start(cell["model"], _density(cell["model"], target))

    def run(level: float) -> Row:
        return _run({**cell, "epochs": 1, "steps": 1} if arm.known else cell, arm.method(level))

    found = matched(run, level, target, "bytes", arm.slope)
    if arm.known:
        found |= _run(cell, arm.method(found["factor"]))
    return found | {"level": found["factor"]}


def _run(cell: Cell, method: tasks.Method) -> Row:
    model = equal_budgets_models.MODELS[cell["model"]]
    settings = {"width": model.width, "epochs": model.epochs, "momentum": 0.9 * (model.decay > 0)}
    return model.train({**settings, **cell, "rate": cell["rate"] * SUITS[cell["model"]]}, method)


@functools.cache
def _bytes_of(model: str, compressor: PerParameter) -> float:
    """Return the bytes of a step, of a method whose steps all send as much."""
    cell = {"model": model, "workers": WORKERS, "rate": 1.0, "epochs": 1, "steps": 1, "seed": 0}
    return float(_run(cell, tasks.Method(compressor))["bytes"])


@functools.cache
def _density(model: str, target: float) -> float:
    """Return TopK's density of so many bytes, about."""
    one = _bytes_of(model, PerParameter(TopK(0.01)))
    return min(0.01 * target / one, 0.5)


def _runs(rows: list[Row], model: str, name: str, arm: str) -> list[Row]:
    return tuned_rate.runs(rows, **{"model": model, "as": name, "arm": arm})


def _apart(rows: list[Row], model: str, name: str, arm: str, other: str) -> list[float]:
    """Return the losses less those of another arm, by seed."""
    ours, theirs = (
        {row["seed"]: values([row], "loss")[0] for row in _runs(rows, model, name, each)}
        for each in (arm, other)
    )
    both = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return [each for each in both if math.isfinite(each)]


def page(rows: list[Row]) -> str:
    """Return a table for each model and amount of bytes."""
    text = ""
    for model in SUITS:
        dense = _runs(rows, model, NO_BYTES, DENSE)
        of_dense = spread(values(dense, "loss"), ".3f")
        for name in AS:
            lines = []
            for arm in (*ARMS, QUANTISED):
                if not (runs := _runs(rows, model, name, arm)):
                    continue
                apart = _apart(rows, model, name, arm, TOPK)
                between = "{:+.3f} to {:+.3f}".format(*interval(apart)) if len(apart) > 1 else ""
                edge = " (edge)" if tuned_rate.is_edge(runs[0], RATES) else ""
                level = runs[0]["level"]
                lines.append(
                    [
                        arm,
                        "" if level is None else f"{level:.3g}",
                        spread(values(runs, "loss"), ".3f"),
                        "" if arm == TOPK else spread(apart, "+.3f"),
                        "" if arm == TOPK else between,
                        spread(values(runs, "density"), ".3f", 100),
                        f"{statistics.fmean(values(runs, 'bytes')):,.0f}",
                        f"{SUITS[model] * runs[0]['rate']:g}{edge}",
                    ]
                )
            if lines:
                head = ["", "level", "loss", "apart", "95 %", "density, %", "bytes", "rate"]
                text += f"\n## {MODELS[model]}, bytes of {name}\n\n"
                text += f"Dense: {of_dense}.\n\n{table(head, lines)}"
    return text


def claims(rows: list[Row]) -> list[Claim]:
    """Ask of each threshold whether it is better than each other method at equal bytes."""
    found = []
    for model in SUITS:
        for name in AS:
            for arm in THRESHOLDS:
                for other in OTHERS:
                    apart = _apart(rows, model, name, arm, other)
                    if len(apart) > 1:
                        text = f"{model}, bytes of {name}: {arm} is better than {other}"
                        said = verdict(apart, [0.0] * len(apart))
                        found.append(Claim(text, "", spread(apart, "+.3f"), said))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the losses of each amount of bytes, a panel per model."""
    figure.set_size_inches(plot_style.WIDTH, 6)
    for ax, model in zip(figure.subplots(len(SUITS), 1), SUITS, strict=True):
        arms = (*ARMS, QUANTISED)
        for place, (arm, colour) in enumerate(zip(arms, plot_style.SERIES, strict=False)):
            for column, name in enumerate(AS):
                losses = values(_runs(rows, model, name, arm), "loss")
                at = [column + 0.12 * (place - 2)] * len(losses)
                ax.plot(at, losses, "o", ms=4, color=colour)
            ax.plot([], [], "o", color=colour, label=arm if model == "lstm" else None)
        dense = values(_runs(rows, model, NO_BYTES, DENSE), "loss")
        if dense:
            ax.axhline(statistics.fmean(dense), color=plot_style.MUTED, lw=0.8)
        ax.set_xticks(range(len(AS)), [f"bytes of {name}" for name in AS])
        ax.set(title=model, ylabel="validation loss")
        ax.grid(visible=False, axis="x")
    plot_style.legend(figure)


if __name__ == "__main__":
    parts = (ABOUT, cells, train, page, claims, draw)
    before = functools.partial(tuned_rate.trials, rates=RATES)
    sys.exit(frame.main(Experiment("equal_bytes", *parts, before=before)))
