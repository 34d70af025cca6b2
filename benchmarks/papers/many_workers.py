"""What a step costs, and what training reaches, with 8 to 64 workers.

    python benchmarks/papers/many_workers.py
    python benchmarks/papers/many_workers.py --only part=step   # bytes and seconds, alone

All workers are simulated in one process. What they send, and what comes of it, is real.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import frame
import torch
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, where
from matplotlib.figure import Figure
from shared_mask import DecodedOnce, SharedTopK
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

SIZES, STEPS, ROWS, WORDS, DENSE = (8, 16, 32, 64), 160, 64, 956, "dense"
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
TRAINED = METHODS | {"SharedTopK": (DecodedOnce(0.01), None)}
"""The same, with the same bits, in less time."""
BUDGET = 1 / 8
"""Of the bytes of a dense all-reduce; as many as four bits of 32."""
LARGE: traces.Shapes = {"embedding": (2_500, 300), "lstm0": (1200, 300), "lstm1": (1200, 300)}
SMALL: traces.Shapes = {"matrix": (128, 64), "other": (64, 64)}
RATES = (0.003, 0.006, 0.012)
PARTS = ("step", "launches")
USUAL, EQUAL = "usual", "equal bytes"
LAUNCHES = "--launches"
ABOUT = f"""
Simulated workers, from 8 to 64. *Received* are bytes that a worker receives in a step, of a model
of 1.5 million elements, and as a share of a dense all-reduce's. *Computing* are worker 0's
milliseconds for encoding and decoding them, on one core. *Launches* are the operations that it
starts on a GPU for a bucket of two matrices, beside its collectives, counted on a machine without
one. `SharedTopK` is not a part of the library: see the page on one mask for all workers.

*Loss*: the transformer of the page on optimizers, {STEPS} steps of AdamW with β₁ = 0. The workers
share {ROWS} rows a step, so that dense training is the same for any number of workers. *At equal
bytes* the level of each method is set, for each number of workers, so that a worker receives an
eighth of a dense all-reduce's bytes. Each line has the best of three learning rates, by 8 workers
and the first seed.
"""


def shapes() -> traces.Shapes:
    """Return the shapes of the transformer's parameters."""
    return {name: tuple(param.shape) for name, param in Transformer(WORDS).named_parameters()}


def received(compressor: Compressor, scheme: Scheme | None, workers: int) -> float:
    """Return bytes that a worker receives in a step of the transformer."""
    return traces.trace(compressor, scheme, shapes(), workers, 1).nbytes


@functools.cache
def at_equal_bytes(method: str, workers: int) -> Compressor:
    """Return a method at the highest level within the budget; one without a level as it is."""
    compressor, scheme = TRAINED[method]
    knob = compressor.knob
    if knob is None:
        return compressor
    most = 1.02 * BUDGET * received(*METHODS[DENSE], workers)
    low, high = float(knob.low), float(knob.high)
    for _ in range(12):
        middle = (low + high) / 2 if knob.integer else (low * high) ** 0.5
        middle = round(middle) if knob.integer else middle
        fits = received(compressor.at(middle), scheme, workers) <= most
        low, high = (middle, high) if fits else (low, middle)
    return compressor.at(round(low) if knob.integer else low)


def cells(seeds: int) -> list[Cell]:
    """Return steps and launches of each method and number of workers, then all trainings.

    Dense training and the methods' usual levels have one seed, since nothing is claimed of them.
    ``GTopK`` beyond eight workers and all methods among 64 have one seed too, to save CPU hours.
    """
    found: list[Cell] = [
        {"part": part, "method": method, "workers": workers, "seed": 0}
        for part in PARTS
        for workers in SIZES
        for method in METHODS
    ]
    train: list[Cell] = []
    for workers in SIZES:
        for level, method in ((level, each) for level in (USUAL, EQUAL) for each in METHODS):
            if method == DENSE and (level, workers) != (USUAL, SIZES[0]):
                continue
            if method == "GTopK" and level == EQUAL and workers == SIZES[-1]:
                continue  # the level is nearly the usual one, and the run takes ten minutes
            kind = {"part": "train", "level": level, "method": method, "workers": workers}
            several = seeds if level == EQUAL or method == DENSE else 1
            if (method == "GTopK" and workers > SIZES[0]) or workers == SIZES[-1]:
                several = 1
            if workers == SIZES[0]:
                train += tuned_rate.cells([kind], RATES, several)
            else:  # at the rate of the fewest workers
                train += [
                    {**kind, "rate": tuned_rate.TUNED, "seed": seed} for seed in range(several)
                ]
    return found + sorted(({**each, "steps": STEPS} for each in train), key=lambda c: c["seed"])


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    if cell["part"] in PARTS:
        return []
    return tuned_rate.trials({**cell, "workers": SIZES[0]}, RATES)


def train(cell: Cell, data: Path | None) -> Row:
    """Measure a step, count its launches, or train."""
    compressor, scheme = METHODS[cell["method"]]
    workers = cell["workers"]
    if cell["part"] == "step":
        torch.set_num_threads(1)
        step = traces.trace(compressor, scheme, LARGE, workers, 3)
        return {"received": step.nbytes, "milliseconds": 1000 * sum(step.seconds)}
    if cell["part"] == "launches":
        return _launches(cell["method"], workers)
    compressor, scheme = TRAINED[cell["method"]]
    if cell["level"] == EQUAL:
        compressor = at_equal_bytes(cell["method"], workers)
    arm = Arm(compressor, scheme=scheme, momentum=0.0)
    rate, steps, seed = tuned_rate.rate(cell), cell["steps"], cell["seed"]
    at = None if compressor.knob is None else compressor.level
    return run(arm, workers, rate=rate, steps=steps, seed=seed, batch=ROWS // workers) | {"at": at}


def _launches(method: str, workers: int) -> Row:
    """Count in a process of its own: Triton's interpreter, once chosen, stays."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        [sys.executable, __file__, LAUNCHES, method, str(workers)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    counted: Row = json.loads(run.stdout.splitlines()[-1])
    return counted


def print_launches(method: str, workers: int) -> None:
    """Print the launches and waits of a method, as JSON."""
    from tests.support.launches import launches_among

    compressor, scheme = METHODS[method]
    counts = launches_among(by_default(compressor), scheme, SMALL, workers)
    sys.stdout.write(json.dumps({"launches": counts.total, "waits": counts.waits}) + "\n")


def page(rows: list[Row]) -> str:
    """Return a table of steps, and tables of losses."""
    text = ""
    if steps := where(rows, part="step"):
        dense = {row["workers"]: row["received"] for row in where(steps, method=DENSE)}
        lines = [
            [
                method,
                str(row["workers"]),
                f"{row['received']:,.0f}",
                f"{row['received'] / dense[row['workers']]:.3f}" if row["workers"] in dense else "",
                f"{row['milliseconds']:.1f}",
                *_counted(rows, method, row["workers"]),
            ]
            for method in METHODS
            for row in where(steps, method=method)
        ]
        head = ["method", "W", "received", "of dense", "computing, ms", "launches", "host waits"]
        text += f"**A step**\n\n{table(head, lines)}\n"
    for level in (USUAL, EQUAL):
        lines = [
            [method, *(_losses(rows, level, method, workers) for workers in SIZES)]
            for method in METHODS
        ]
        heads = ["method", *(f"W = {workers}" for workers in SIZES)]
        lines = [line for line in lines if any(line[1:])]
        text += f"**Loss, {level}**\n\n{table(heads, lines)}\n" if lines else ""
    return text


def _counted(rows: list[Row], method: str, workers: int) -> list[str]:
    counted = where(rows, part="launches", method=method, workers=workers)
    return [str(counted[0][figure]) if counted else "" for figure in ("launches", "waits")]


def _losses(rows: list[Row], level: str, method: str, workers: int) -> str:
    runs = trained(rows, level, method, workers)
    if not runs:
        return ""
    at = runs[0]["at"] if level == EQUAL else None
    return spread(values(runs, "loss"), ".3f") + ("" if at is None else f" at {at:.3g}")


def trained(rows: list[Row], level: str, method: str, workers: int) -> list[Row]:
    """Return a line's runs at its rate; dense training is the same for any W and level."""
    if method == DENSE:
        level, workers = USUAL, SIZES[0]
    kind = {"part": "train", "level": level, "method": method, "workers": workers}
    if workers == SIZES[0]:
        return tuned_rate.runs(rows, **kind)
    return where(rows, rate=tuned_rate.TUNED, **kind)


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
    dense = {row["workers"]: row["received"] for row in where(rows, part="step", method=DENSE)}
    if not dense:
        return
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for method in METHODS:
        steps = [r for r in where(rows, part="step", method=method) if r["workers"] in dense]
        sizes = [row["workers"] for row in steps]
        left.plot(sizes, [r["received"] / dense[r["workers"]] for r in steps], label=method)
        known = {size: trained(rows, EQUAL, method, size) for size in SIZES}
        losses = {
            size: statistics.fmean(values(runs, "loss")) for size, runs in known.items() if runs
        }
        right.plot(list(losses), list(losses.values()), "o-")
    left.set(xlabel="workers", ylabel="received, of dense", xscale="log", yscale="log")
    right.set(xlabel="workers", ylabel="loss at equal bytes", xscale="log")
    for axes in (left, right):
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.minorticks_off()
    plot_style.legend(figure)


if __name__ == "__main__":
    if LAUNCHES in sys.argv:
        print_launches(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    sys.exit(
        frame.main(
            Experiment("many_workers", ABOUT, cells, train, page, claims, draw, before=before)
        )
    )
