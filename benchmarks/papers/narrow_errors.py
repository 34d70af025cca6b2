"""Errors kept in fewer bits: float32, bfloat16 and int8 beside each other, on three models.

python benchmarks/papers/narrow_errors.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.figure import Figure
from transformer_runs import Arm, run

from lightning_gc import ErrorFeedback, NarrowResidual, NoMemory, TopK
from lightning_gc.memories import Memory
from lightning_gc.methods import plot_style

MEMORIES: dict[str, Memory] = {
    "float32": ErrorFeedback(),
    "bfloat16": NarrowResidual("bfloat16"),
    "int8": NarrowResidual("int8"),
    "no errors kept": NoMemory(),
}
TASKS: dict[str, Cell] = {
    "LSTM, SGD": {"rate": 20.0, "epochs": 3, "hidden": 64, "columns": 20},
    "ResNet on digits, momentum": {"rate": 0.05, "epochs": 10, "width": 16, "batch": 16},
    "transformer, AdamW": {"rate": 0.003, "steps": 640},
}
ABOUT = """
Error feedback takes as much memory as the gradient. `NarrowResidual` keeps errors in bfloat16 (2
bytes a parameter) or in 8 bits and a scale for each block (1.03 bytes), rounded at random without
bias. Is a run as good? `TopK(0.01)`, four simulated workers, three models: the demo's LSTM (64
units, three epochs of Python's documentation, learning rate 20), the ResNet of examples/vision.py
on digits (width 16, ten epochs, 0.05), and a transformer of two layers, 64 wide (640 steps of
AdamW, 0.003, β₁ = 0, with which sparse gradients train well). One learning rate for all. Validation
loss at the end. The ResNet's losses differ most between seeds, so it has four times as many.
"""
MORE = {"ResNet on digits, momentum": 4}  # times as many seeds


def cells(seeds: int) -> list[Cell]:
    """Return all memories on all models."""
    return [
        {"task": task, "memory": memory, "workers": 4, "seed": seed}
        for task in TASKS
        for seed in range(seeds * MORE.get(task, 1))
        for memory in MEMORIES
    ]


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    settings, memory = cell | TASKS[cell["task"]], MEMORIES[cell["memory"]]
    if cell["task"].startswith("transformer"):
        arm = Arm(TopK(0.01), memory, momentum=0.0)
        return run(arm, 4, rate=settings["rate"], steps=settings["steps"], seed=cell["seed"])
    method = tasks.Method(TopK(0.01), memory)
    if cell["task"].startswith("LSTM"):
        return tasks.words(settings, method)
    return tasks.photos(settings, method)


def page(rows: list[Row]) -> str:
    """Return the table: models by memories."""
    lines = []
    for task in TASKS:
        shown = [values(where(rows, task=task, memory=memory), "loss") for memory in MEMORIES]
        lines.append([task, *(spread(losses, ".4f") for losses in shown)])
    return table(["validation loss", *MEMORIES], lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Compare int8 with float32, and with no errors at all."""
    found = []
    for task in TASKS:
        narrow, wide, none = (
            values(where(rows, task=task, memory=memory), "loss")
            for memory in ("int8", "float32", "no errors kept")
        )
        n = min(len(narrow), len(wide), len(none))
        if n < 2:
            continue
        apart = abs(statistics.fmean(narrow[:n]) - statistics.fmean(wide[:n]))
        noise = statistics.stdev(wide[:n])
        said = f"{spread(narrow, '.4f')} against {spread(wide, '.4f')}"
        text = f"{task}: int8 is within a standard deviation over seeds of float32 (by the means)"
        found.append(Claim(text, "", said, "agrees" if apart <= noise else "disagrees"))
        text = f"{task}: float32 is better than int8"
        found.append(Claim(text, "", said, verdict(wide[:n], narrow[:n])))
        said = f"{spread(narrow, '.4f')} against {spread(none, '.4f')}"
        text = f"{task}: int8 is better than no errors"
        found.append(Claim(text, "", said, verdict(narrow[:n], none[:n])))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the losses of all seeds, a panel a model."""
    figure.set_size_inches(plot_style.WIDTH, 7)
    for ax, task in zip(figure.subplots(len(TASKS), 1), TASKS, strict=True):
        for index, memory in enumerate(MEMORIES):
            losses = values(where(rows, task=task, memory=memory), "loss")
            ax.plot([index] * len(losses), losses, "o", color=plot_style.SERIES[index], alpha=0.8)
        ax.set_xticks(range(len(MEMORIES)), [m.replace(" ", "\n") for m in MEMORIES])
        ax.set_title(task)
        ax.grid(visible=False, axis="x")
        ax.margins(x=0.15)
    figure.supylabel("validation loss")


if __name__ == "__main__":
    sys.exit(frame.main(Experiment("narrow_errors", ABOUT, cells, train, page, claims, draw)))
