"""What a step costs, and what training reaches, with 8 to 64 workers, by true payloads.

    python benchmarks/papers/many_workers.py
    python benchmarks/papers/many_workers.py --only part=step      # bytes, seconds and launches

All workers are simulated in one process. What they send, and what comes of it, is real.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import frame
import torch
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, where
from matplotlib.figure import Figure
from shared_mask import SharedTopK
from transformer import Transformer
from transformer_runs import Arm, run

from lightning_gc import (
    QSGD,
    BinMeans,
    ChunkedTopK,
    GTopK,
    Identity,
    PowerSGD,
    Quantised,
    SparseReduce,
    TopK,
    TwoShot,
)
from lightning_gc.advice import traces
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.methods import plot_style
from lightning_gc.schemes import Scheme

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.launches import launches_among

SIZES, STEPS, WORDS, DENSE = (8, 16, 32, 64), 160, 956, "dense"
METHODS: dict[str, tuple[Compressor, Scheme | None]] = {
    DENSE: (Identity(), None),
    "QSGD, TwoShot": (QSGD(4), TwoShot()),
    "TopK": (TopK(0.01), None),
    "TopK, SparseReduce": (TopK(0.01), SparseReduce()),
    "GTopK": (GTopK(0.01), None),
    "chunks and bins": (Quantised(ChunkedTopK(), BinMeans(2)), None),
    "SharedTopK": (SharedTopK(0.01), None),
    "PowerSGD": (PowerSGD(2), None),
}
BUDGET = 1 / 8
"""Of the bytes of a dense all-reduce; as many as four bits of 32."""
LARGE: traces.Shapes = {"embedding": (2_500, 300), "lstm0": (1200, 300), "lstm1": (1200, 300)}
SMALL: traces.Shapes = {"matrix": (128, 64), "other": (64, 64)}
RATES = (0.003, 0.006, 0.012)
USUAL, EQUAL = "usual", "equal bytes"
ABOUT = f"""
Simulated workers, from 8 to 64. *Received* are bytes that a worker receives in a step, of a model
of 1.5 million elements, and as a share of a dense all-reduce's. *Computing* are worker 0's
milliseconds for encoding and decoding them, on one core. *Launches* are the operations that it
starts on a GPU for a bucket of two matrices, counted on a machine without one.

*Loss*: the transformer of the page on optimizers, {STEPS} steps of AdamW with β₁ = 0, four rows a
worker, so that more workers have a larger batch. *At equal bytes* the level of each method is set,
for each number of workers, so that a worker receives an eighth of a dense all-reduce's bytes. Each
line has the best of three learning rates, by 8 workers and the first seed.
"""


def shapes() -> traces.Shapes:
    """Return the shapes of the transformer's parameters."""
    return {name: tuple(param.shape) for name, param in Transformer(WORDS).named_parameters()}


def received(compressor: Compressor, scheme: Scheme | None, workers: int) -> float:
    """Return bytes that a worker receives in a step of the transformer."""
    return traces.sent(traces.trace(compressor, scheme, shapes(), workers, 1))


@functools.cache
def at_equal_bytes(method: str, workers: int) -> Compressor:
    """Return a method at the highest level within the budget; dense gradients as they are."""
    compressor, scheme = METHODS[method]
    knob = compressor.knob
    if knob is None:
        return compressor
    most = BUDGET * received(*METHODS[DENSE], workers)
    low, high = float(knob.low), float(knob.high)
    for _ in range(12):
        middle = (low + high) / 2 if knob.integer else (low * high) ** 0.5
        middle = round(middle) if knob.integer else middle
        fits = received(compressor.at(middle), scheme, workers) <= most * 1.02
        low, high = (middle, high) if fits else (low, middle)
    return compressor.at(round(low) if knob.integer else low)


def cells(seeds: int) -> list[Cell]:
    """Return a step of each method and number of workers, then all trainings."""
    found: list[Cell] = [
        {"part": "step", "method": method, "workers": workers, "seed": 0}
        for workers in SIZES
        for method in METHODS
    ]
    for workers in SIZES:
        kinds = [
            {"part": "train", "level": level, "method": method, "workers": workers}
            for level in (USUAL, EQUAL)
            for method in METHODS
            if (level, method) != (EQUAL, DENSE)
        ]
        every = [{**each, "steps": STEPS} for each in tuned_rate.cells(kinds, RATES, seeds)]
        if workers > SIZES[0]:  # at the rate of the fewest workers, with each seed
            every = [
                {**kind, "rate": tuned_rate.TUNED, "steps": STEPS, "seed": seed}
                for seed in range(seeds)
                for kind in kinds
            ]
        found += every
    return sorted(found, key=lambda cell: cell["seed"])


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    if cell["part"] == "step":
        return []
    return tuned_rate.trials({**cell, "workers": SIZES[0]}, RATES)


def train(cell: Cell, data: Path | None) -> Row:
    """Measure a step, or train."""
    compressor, scheme = METHODS[cell["method"]]
    workers = cell["workers"]
    if cell["part"] == "step":
        torch.set_num_threads(1)
        step = traces.trace(compressor, scheme, LARGE, workers, 3)
        counts = launches_among(by_default(compressor), scheme, SMALL, workers)
        return {
            "received": traces.sent(step),
            "milliseconds": 1000 * sum(step.seconds),
            "launches": counts.total,
            "waits": counts.waits,
        }
    if cell["level"] == EQUAL:
        compressor = at_equal_bytes(cell["method"], workers)
    arm = Arm(compressor, scheme=scheme, momentum=0.0)
    rate, steps, seed = tuned_rate.rate(cell), cell["steps"], cell["seed"]
    level = None if compressor.knob is None else compressor.level
    return run(arm, workers, rate=rate, steps=steps, seed=seed) | {"at": level}


def page(rows: list[Row]) -> str:
    """Return a table of steps, and one of losses."""
    steps, text = where(rows, part="step"), ""
    if steps:
        lines = []
        for method in METHODS:
            for row in where(steps, method=method):
                dense = where(steps, method=DENSE, workers=row["workers"])
                share = f"{row['received'] / dense[0]['received']:.3f}" if dense else ""
                lines.append(
                    [
                        method,
                        str(row["workers"]),
                        f"{row['received']:,.0f}",
                        share,
                        f"{row['milliseconds']:.1f}",
                        str(row["launches"]),
                        str(row["waits"]),
                    ]
                )
        head = ["method", "W", "received", "of dense", "computing, ms", "launches", "host waits"]
        text += f"**A step**\n\n{table(head, lines)}\n"
    for level in (USUAL, EQUAL):
        lines = []
        for method in METHODS:
            line = [method]
            for workers in SIZES:
                runs = trained(rows, level, method, workers)
                at = runs[0]["at"] if runs else None
                shown = f" at {at:.3g}" if at is not None and level == EQUAL else ""
                line.append(spread(values(runs, "loss"), ".3f") + shown if runs else "")
            if any(line[1:]):
                lines.append(line)
        heads = ["method", *(f"W = {workers}" for workers in SIZES)]
        text += f"**Loss, {level}**\n\n{table(heads, lines)}\n" if lines else ""
    return text


def trained(rows: list[Row], level: str, method: str, workers: int) -> list[Row]:
    """Return a line's runs at its rate; dense gradients have one level."""
    given = USUAL if method == DENSE else level
    kind = {"part": "train", "level": given, "method": method, "workers": workers}
    runs = where(rows, rate=tuned_rate.TUNED, **kind)
    return tuned_rate.runs(rows, **kind) if workers == SIZES[0] else runs


def claims(rows: list[Row]) -> list[Claim]:
    """Say which method has the lowest loss at equal bytes, for each number of workers."""
    found = []
    for workers in SIZES:
        lines = {
            method: values(trained(rows, EQUAL, method, workers), "loss")
            for method in METHODS
            if method != DENSE and trained(rows, EQUAL, method, workers)
        }
        if len(lines) > 1:
            first, second = sorted(lines, key=lambda each: statistics.fmean(lines[each]))[:2]
            said = f"{spread(lines[first], '.3f')} against {spread(lines[second], '.3f')}"
            text = f"{workers} workers, equal bytes: {first} before {second}"
            found.append(Claim(text, "", said, frame.verdict(lines[first], lines[second])))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw bytes of a step, and losses at equal bytes, by the number of workers."""
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for method in METHODS:
        steps = where(rows, part="step", method=method)
        dense = {row["workers"]: row["received"] for row in where(rows, part="step", method=DENSE)}
        sizes = [row["workers"] for row in steps if row["workers"] in dense]
        left.plot(sizes, [row["received"] / dense[row["workers"]] for row in steps], label=method)
        known = [size for size in SIZES if trained(rows, EQUAL, method, size)]
        losses = [
            statistics.fmean(values(trained(rows, EQUAL, method, size), "loss")) for size in known
        ]
        right.plot(known, losses, "o-")
    left.set(xlabel="workers", ylabel="received, of dense", xscale="log", yscale="log")
    right.set(xlabel="workers", ylabel="loss at equal bytes", xscale="log")
    for axes in (left, right):
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.minorticks_off()
    plot_style.legend(figure)


if __name__ == "__main__":
    parts = (ABOUT, cells, train, page, claims, draw)
    sys.exit(frame.main(Experiment("many_workers", *parts, before=before)))
