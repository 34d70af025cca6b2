"""What a step costs with 8 to 64 workers: bytes, seconds, and operations that a GPU starts.

    python benchmarks/papers/many_workers.py    # alone, for it measures time

All workers are simulated in one process; their messages are real. What training reaches with as
many workers is the question of common_mask.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import frame
import torch
from frame import Cell, Experiment, Row, table, where
from matplotlib.figure import Figure

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

SIZES, DENSE = (8, 16, 32, 64), "dense"
METHODS: dict[str, tuple[Compressor, Scheme | None]] = {
    DENSE: (Identity(), None),
    "QSGD, TwoShot": (QSGD(4), TwoShot()),
    "TopK": (TopK(0.01), None),
    "TopK, SparseReduce": (TopK(0.01), SparseReduce()),
    "GTopK": (GTopK(0.01), None),
    "chunks and bins": (Quantised(ChunkedTopK(), BinMeans(2)), None),
    "PowerSGD": (PowerSGD(2), None),
}
LARGE: traces.Shapes = {"embedding": (2_500, 300), "lstm0": (1200, 300), "lstm1": (1200, 300)}
SMALL: traces.Shapes = {"matrix": (128, 64), "other": (64, 64)}
PARTS = ("step", "launches")
LAUNCHES = "--launches"
ABOUT = """
Simulated workers, from 8 to 64. *Received* are bytes that a worker receives in a step, of a model
of 1.5 million elements, and as a share of a dense all-reduce's. *Computing* are worker 0's
milliseconds for encoding and decoding them, on one core. *Launches* are the operations that it
starts on a GPU for a bucket of two matrices, beside its collectives, counted on a machine without
one.
"""


def cells(seeds: int) -> list[Cell]:
    """Return steps and launches of each method and number of workers."""
    return [
        {"part": part, "method": method, "workers": workers, "seed": 0}
        for part in PARTS
        for workers in SIZES
        for method in METHODS
    ]


def train(cell: Cell, data: Path | None) -> Row:
    """Measure a step, or count its launches."""
    compressor, scheme = METHODS[cell["method"]]
    workers = cell["workers"]
    if cell["part"] == "launches":
        return _launches(cell["method"], workers)
    torch.set_num_threads(1)
    step = traces.trace(compressor, scheme, LARGE, workers, 3)
    return {"received": step.nbytes, "milliseconds": 1000 * sum(step.seconds)}


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
    """Return a table of steps."""
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
    return text


def _counted(rows: list[Row], method: str, workers: int) -> list[str]:
    counted = where(rows, part="launches", method=method, workers=workers)
    return [str(counted[0][figure]) if counted else "" for figure in ("launches", "waits")]


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the bytes of a step by the number of workers."""
    dense = {row["workers"]: row["received"] for row in where(rows, part="step", method=DENSE)}
    axes = figure.add_subplot()
    for method in METHODS:
        steps = [r for r in where(rows, part="step", method=method) if r["workers"] in dense]
        sizes = [row["workers"] for row in steps]
        axes.plot(sizes, [r["received"] / dense[r["workers"]] for r in steps], label=method)
    axes.set(xlabel="workers", ylabel="received, of dense", xscale="log", yscale="log")
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.minorticks_off()
    plot_style.legend(figure)


if __name__ == "__main__":
    if LAUNCHES in sys.argv:
        print_launches(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    sys.exit(
        frame.main(Experiment("many_workers", ABOUT, cells, train, page, lambda rows: [], draw))
    )
