"""Absolute and relative compressors where workers' data differ: logistic regression, 20 workers.

    python benchmarks/papers/heterogeneity.py --data DATA     # with libsvm/a9a and madelon/

Paper 004, Remarks 6 and 8: with error feedback, the bound's compression term grows like 1/δ² for
δ-contractions where data differ, like 1/δ where they do not, and like v² for absolute compressors
in both cases. §5.1.1 conjectures that absolute ones are therefore better in federated learning.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import frame
import torch
from frame import Cell, Experiment, Row
from heterogeneity_page import (
    ARMS,
    BATCH,
    HARD,
    NEAREST,
    ROUNDING,
    TOP,
    claims,
    draw,
    page,
)
from logistic_regression import Regression, lines_of
from logistic_regression import madelon as read_madelon
from torch import Tensor

from lightning_gc import (
    AbsoluteRounding,
    AllGather,
    ErrorFeedback,
    HardThreshold,
    Identity,
    NoMemory,
    TopK,
    Uniform,
)
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
from lightning_gc.engine.statistics import EpochStatistics
from lightning_gc.memories import Memory
from lightning_gc.transports import Simulated

WORKERS, STEPS, CONDITION = 20, 200, 20.0
NAMES = [f"worker {i}" for i in range(WORKERS)]
ABOUT = f"""
Paper 004, Remarks 6 and 8 and the conjecture in §5.1.1: where workers' data differ, compressors
with an absolute error bound should do better than those whose error is a share of the gradient.

Logistic regression with l2 = L/{CONDITION:g} and γ = 1/(L + l2), from zero; madelon's columns are
standardised. {WORKERS} workers whose data are dealt at random or sorted by label; each takes all
its samples in a step, or {BATCH} at random. {STEPS} steps, error feedback in units of the update.
*Gap* is the mean of f − f* over the last fifth of the steps. The hard threshold and the step are
those multiples of the root mean square of a local gradient's element at the optimum. Volume is bits
of payload per element and step; equal volume is reached by interpolation between levels. Absolute
rounding is entropy-coded and the nearest level is not, which is part of their difference.

†: these lines, and how near to 2 counts as near, were settled after two of three seeds had been
seen. The rule by D too was made after data were seen: as madelon's D is the same both ways, nothing
is said of how it is dealt. Without the rule its line on how fast ‖e‖² of Top-k grows would read
"disagrees", the four others "cannot be told". The conjecture as the paper words it is the line
above each: where data differ, absolute ones are better.
"""


@functools.cache
def problem(name: str, data: Path) -> tuple[Regression, Tensor, float, Tensor]:
    """Return the regression, x*, f* and the labels."""
    if name == "madelon":
        samples, labels = read_madelon(data / "madelon")
        samples = (samples - samples.mean(0)) / samples.std(0)
    else:
        rows = [line.split() for line in lines_of(data / "libsvm", "a9a") or ()]
        labels = torch.tensor([float(row[0]) for row in rows]).double()
        samples = torch.zeros(len(rows), 123).double()
        for sample, row in zip(samples, rows, strict=True):
            sample[[int(word.partition(":")[0]) - 1 for word in row[1:]]] = 1
    smoothness = float(torch.linalg.matrix_norm(samples, 2)) ** 2 / (4 * len(samples))
    l2 = smoothness / CONDITION
    found = Regression(samples * labels[:, None], l2, 1 / (smoothness + l2))
    return found, *found.minimum(), labels


def cells(seeds: int) -> list[Cell]:
    """Return all: both data sets, splits and batches, every arm at its levels."""
    return [
        {"arm": arm, "level": level, "task": task, "split": split, "batch": batch}
        | {"steps": STEPS, "seed": seed}
        for seed in range(seeds)
        for task in ("a9a", "madelon")
        for batch in ("all", BATCH)
        for split in ("shuffled", "sorted")
        for arm, levels in ARMS.items()
        for level in levels
    ]


def method(arm: str, level: float, scale: float, d: int) -> tuple[Compressor, Memory]:
    """Return compressor and memory of an arm."""
    memory = ErrorFeedback(lr_aware=True)
    made: dict[str, Any] = {
        "none": lambda: (Identity(), NoMemory()),
        TOP: lambda: (TopK(level), memory),
        HARD: lambda: (HardThreshold(level * scale), memory),
        NEAREST: lambda: (Uniform(int(level), "nearest", block_size=d), memory),
        ROUNDING: lambda: (AbsoluteRounding(level * scale), memory),
    }
    compressor, memory = made[arm]()
    return layerwise(compressor), memory


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    assert data is not None
    regression, optimum, best, labels = problem(cell["task"], data)
    draw = torch.Generator().manual_seed(cell["seed"])
    order = torch.randperm(len(labels), generator=draw)
    if cell["split"] == "sorted":
        order = order[labels[order].argsort(stable=True)]
    dealt = order[: len(order) // WORKERS * WORKERS].view(WORKERS, -1)
    shares = regression.samples[dealt].float()  # (workers, n, d)

    def gradients(x: Tensor) -> Tensor:
        rows = shares
        if cell["batch"] != "all":
            chosen = torch.randint(shares.shape[1], (WORKERS, cell["batch"]), generator=draw)
            rows = shares[torch.arange(WORKERS)[:, None], chosen]
        slopes = torch.sigmoid(-(rows @ x.float()))  # (workers, n)
        return regression.l2 * x.float() - torch.einsum("wn,wnd->wd", slopes, rows) / rows.shape[1]

    d, rate = len(optimum), regression.rate
    scale = float(torch.stack([gradients(optimum) for _ in range(20)]).square().mean().sqrt())
    compressor, memory = method(cell["arm"], cell["level"], scale, d)
    # Under AllGather a worker's message does not depend on the others', and the mean is taken of
    # what is decoded. So W workers are W tensors of one engine: the same numbers, in a tenth of the
    # time, as tests/examples/test_papers.py holds.
    engine = Engine(compressor, memory, None if cell["arm"] == "none" else AllGather())
    engine.learning_rates.now = dict.fromkeys(NAMES, rate)
    engine.statistics.epoch = sums = EpochStatistics(errors=True)
    transport = Simulated(1)
    x, gaps = torch.zeros_like(optimum), []
    for step in range(cell["steps"]):
        grads = gradients(x)
        flow = engine.flow(grads.flatten(), dict.fromkeys(NAMES, (d,)))
        engine.advance()
        with torch.no_grad():
            transport.run([flow])
        x -= rate * grads.mean(0)
        if step >= cell["steps"] * 4 // 5:
            gaps.append(regression.value(x) - best)
    elements, dense = cell["steps"] * d * WORKERS, cell["arm"] == "none"
    return {
        "gap": statistics.fmean(gaps),
        "error": sums.total_error_update / (cell["steps"] * WORKERS),
        "density": 1.0 if dense else engine.statistics.tally.sent / elements,
        "bits": 32.0 if dense else engine.statistics.tally.payload_bytes * 8 / elements,
        "scale": scale,
    }


if __name__ == "__main__":
    torch.set_default_dtype(torch.float32)
    data = "folder with libsvm/a9a and madelon/ (gzipped or not)"
    sys.exit(
        frame.main(Experiment("heterogeneity", ABOUT, cells, train, page, claims, draw, data=data))
    )
