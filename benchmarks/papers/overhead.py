"""CPU time of compression beside that of the thesis's medium model; sort against topk.

    python benchmarks/papers/overhead.py

Thesis, Table B.2, medium, one worker: compute time per epoch is 9 % (QSGD), 13 % (DGC) and 23 to
26 % (Top-k) above dense's, on a T4 GPU; "sort" is said to be 20 % faster than "topk".
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.figure import Figure

from lightning_gc import DGC, QSGD, HardThreshold, PerParameter, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.engine import Engine
from lightning_gc.transports import Simulated

from models import BPTT, WORDS, Chain, Words  # isort: skip # the path is set by tasks
import torch
from torch import Tensor, nn

from lightning_gc.methods import plot_style

COLUMNS = 256  # of the thesis
ARMS: dict[str, Callable[[], Compressor]] = {
    "QSGD, 7 bits": lambda: QSGD(7),
    "DGC, 1 %": lambda: DGC(0.01),
    "Top-k, 1 %": lambda: TopK(0.01),
    "Top-k, 1 %, sampled": lambda: TopK(0.01, selection="sampled"),
    "hard threshold": lambda: HardThreshold(1e-5),
}
THEIRS = {"QSGD, 7 bits": "+9.2 %", "DGC, 1 %": "+12.7 %", "Top-k, 1 %": "+22.7 to 26 %"}
ABOUT = f"""
Thesis, Table B.2, medium model, one worker: compute time per epoch above dense's.

The same model (two LSTM layers of 300, {WORDS:,} words, tied; 4.4 M parameters), batches of
{COLUMNS} columns of {BPTT} words, float32, on one thread of a CPU: CPU seconds of forward and
backward passes beside those of compression, error feedback and decompression of every tensor,
alternately in one process. Text is a Markov chain's. A CPU is not a T4, so that only the order of
methods is comparable.
"""


def cells(seeds: int) -> list[Cell]:
    """Return the repeats, in each of which all is measured."""
    return [{"steps": 4, "seed": seed} for seed in range(seeds)]


def measure(work: Callable[[], object]) -> float:
    """Return CPU seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


def train(cell: Cell, data: Path | None) -> Row:
    """Measure once."""
    torch.manual_seed(cell["seed"])
    model = Words()
    text = Chain(COLUMNS * cell["steps"], cell["seed"] + 1).words.split(COLUMNS)
    engines = {name: Engine(PerParameter(make())) for name, make in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("model", *ARMS, "sort", "topk")}
    for words in text:
        seconds["model"].append(measure(partial(step, model, words)))
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        flat = torch.cat([grad.flatten() for grad in grads.values()])
        shapes = {name: tuple(grad.shape) for name, grad in grads.items()}
        for name, engine in engines.items():
            flow = engine.flow(flat.clone(), shapes)
            engine.advance()
            seconds[name].append(measure(partial(Simulated(1).run, [flow])))
        pieces = [grad.flatten() for grad in grads.values()]
        seconds["sort"].append(measure(partial(sort, pieces)))
        seconds["topk"].append(measure(partial(topk, pieces)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.5)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def step(model: nn.Module, words: Tensor) -> None:
    """Run forward and backward passes."""
    model.zero_grad()
    outputs = model(words[:, :-1])
    nn.functional.cross_entropy(outputs.flatten(0, 1), words[:, 1:].flatten()).backward()


def sort(pieces: list[Tensor]) -> list[Tensor]:
    """Select 1 % as the thesis's code does."""
    return [torch.sort(p**2).indices[-max(1, p.numel() // 100) :] for p in pieces]


def topk(pieces: list[Tensor]) -> list[Tensor]:
    """Select 1 % by torch.topk."""
    return [torch.topk(p.abs(), max(1, p.numel() // 100), sorted=False).indices for p in pieces]


def shares(rows: list[Row], name: str) -> list[float]:
    """Return CPU seconds over the model's, per repeat."""
    return [row[name] / row["model"] for row in where(rows)]


def page(rows: list[Row]) -> str:
    """Return the table."""
    lines = [
        [
            name,
            THEIRS.get(name, "–"),
            spread(shares(rows, name), "+.1f", 100) + " %",
            spread(values(rows, name), ".0f", 1000),
        ]
        for name in (*ARMS, "sort", "topk")
    ]
    lines.append(["the model", "", "", spread(values(rows, "model"), ".0f", 1000)])
    return table(["", "thesis, T4", "CPU time above the model's", "CPU ms per step"], lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Compare orders."""
    qsgd, dgc, top = (shares(rows, name) for name in list(ARMS)[:3])
    said = ", ".join(f"{n} {spread(shares(rows, n), '+.1f', 100)} %" for n in list(ARMS)[:3])
    both = f"sort {spread(values(rows, 'sort'), '.0f', 1000)} ms, "
    both += f"topk {spread(values(rows, 'topk'), '.0f', 1000)} ms"
    sort_faster = verdict(values(rows, "sort"), values(rows, "topk"))
    return [
        Claim("QSGD costs less compute than DGC", "+9.2 and +12.7 %", said, verdict(qsgd, dgc)),
        Claim("DGC costs less than Top-k", "+12.7 and +22.7 to 26 %", said, verdict(dgc, top)),
        Claim(
            "Top-k by sort, as the thesis selects, costs more than QSGD",
            "+22.7 to 26 and +9.2 %",
            f"the sort alone {spread(shares(rows, 'sort'), '+.1f', 100)} %",
            verdict(qsgd, shares(rows, "sort")),
        ),
        Claim("sort is faster than topk", "20 %, T4", both, sort_faster),
    ]


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw shares."""
    ax = figure.subplots()
    names = [*ARMS, "sort", "topk"]
    means = [100 * statistics.fmean(shares(rows, name)) for name in names]
    ax.barh(names, means, color=plot_style.SERIES[0])
    ax.invert_yaxis()
    ax.set(xlabel="CPU time, % of forward and backward")


if __name__ == "__main__":
    assert tasks.ROOT
    sys.exit(frame.main(Experiment("overhead", ABOUT, cells, train, page, claims, draw)))
