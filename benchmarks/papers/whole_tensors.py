"""Which tensors are worth sending whole: small ones, norms and biases, embeddings, the head.

python benchmarks/papers/whole_tensors.py
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from pathlib import Path

import frame
import optimizers
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values
from matplotlib.figure import Figure
from transformer_runs import Arm, run

from lightning_gc import (
    QSGD,
    BinMeans,
    ChunkedTopK,
    Identity,
    PerParameter,
    PowerSGD,
    Quantised,
    SizeSwitch,
    TopK,
)
from lightning_gc.compressors import Compressor
from lightning_gc.methods import plot_style

WORKERS, STEPS, DENSE = 4, 320, "dense"
EMBEDDING, HEAD = "embedding.weight", "head.weight"
METHODS: dict[str, tuple[Compressor, Compressor]] = {
    "QSGD": (QSGD(4), QSGD(8)),
    "TopK": (TopK(0.01), TopK(0.1)),
    "chunks and bins": (
        Quantised(ChunkedTopK(), BinMeans(2)),
        Quantised(ChunkedTopK(0.125), BinMeans(2)),
    ),
    "PowerSGD": (PowerSGD(2), PowerSGD(16)),
}
"""Each at its usual level, and at one of more bytes."""
RULES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "small": (),
    "small and embedding": (EMBEDDING,),
    "small and head": (HEAD,),
    "small, embedding and head": (EMBEDDING, HEAD),
}
"""What is sent whole; *small* has fewer than 1,024 elements or one dimension."""
MORE = "small, more bytes"
RATES = {
    "sgd": (0.03, 0.1, 0.3),
    "adamw": (0.0015, 0.003, 0.006, 0.012),
    "muon": (0.005, 0.01, 0.02),
}
NAMES = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
ABOUT = """
Four workers train the transformer of the page on optimizers, with a head of its own, for 320 steps.
Embedding and head have 61,184 elements each, the blocks 100,096 in all, of which norms and biases
have 1.8 %. *Small* is what the library does: tensors of fewer than 1,024 elements or one dimension
are sent whole. *More bytes* is the same rule at a level of the method that sends more. *Gap*: the
mean loss less that of dense gradients with the same optimizer. *On the line*: the gap that the
method has at as many bytes without the rule, between its two levels, by the logarithm of the bytes;
at more bytes than the second level has, that level's gap, and at fewer than the first has, the line
goes on. A rule is worth its bytes if its gap is smaller. Every line is at its own learning rate,
the best of three or four with the first seed.
"""


def arm_of(cell: Cell) -> Arm:
    """Return what a cell sends."""
    make = functools.partial(optimizers.make, cell["optimizer"], True)
    if cell["method"] == DENSE:
        return Arm(Identity(), make=make, tied=False)
    usual, more = METHODS[cell["method"]]
    compressor, whole = (more, ()) if cell["whole"] == MORE else (usual, RULES[cell["whole"]])
    inner = compressor if whole is None else SizeSwitch(compressor)
    levels = tuple((name, None) for name in whole or ())
    return Arm(PerParameter(inner, levels), make=make, tied=False)


def cells(seeds: int) -> list[Cell]:
    """Return dense, and all rules with each method, under each optimizer."""
    found: list[Cell] = []
    for optimizer, rates in RATES.items():
        kinds = [{"optimizer": optimizer, "method": DENSE, "whole": ""}]
        kinds += [
            {"optimizer": optimizer, "method": method, "whole": rule}
            for method in METHODS
            for rule in (*RULES, MORE)
        ]
        found += [{**cell, "steps": STEPS} for cell in tuned_rate.cells(kinds, rates, seeds)]
    return sorted(found, key=lambda cell: bool(cell["seed"]))


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    return tuned_rate.trials(cell, RATES[cell["optimizer"]])


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    rate, steps, seed = tuned_rate.rate(cell), cell["steps"], cell["seed"]
    return run(arm_of(cell), WORKERS, rate=rate, steps=steps, seed=seed)


class Line:
    """The runs of one method by one rule, beside those of dense gradients."""

    def __init__(self, rows: list[Row], optimizer: str, method: str, rule: str) -> None:
        kind = {"optimizer": optimizer, "method": method, "whole": rule}
        self.runs = tuned_rate.runs(rows, **kind)
        self.dense = tuned_rate.runs(rows, optimizer=optimizer, method=DENSE)
        self.known = bool(self.runs and self.dense)

    @property
    def gap(self) -> float:
        """The mean loss above that of dense gradients."""
        mine, dense = (statistics.fmean(values(each, "loss")) for each in (self.runs, self.dense))
        return mine - dense

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense gradients."""
        return float(self.dense[0]["bytes"] / self.runs[0]["bytes"])


def on_the_line(rows: list[Row], optimizer: str, method: str, ratio: float) -> float:
    """Return the gap of a method without a rule at a ratio, between its two levels; or NaN."""
    ends = [Line(rows, optimizer, method, rule) for rule in ("small", MORE)]
    if not all(end.known for end in ends):
        return math.nan
    (x0, y0), (x1, y1) = ((math.log(end.ratio), end.gap) for end in ends)
    return y0 + (y1 - y0) * min((math.log(ratio) - x0) / (x1 - x0), 1.0)


def page(rows: list[Row]) -> str:
    """Return a table for each optimizer."""
    text = ""
    for optimizer, name in NAMES.items():
        lines = []
        for method in METHODS:
            for rule in (*RULES, MORE):
                line = Line(rows, optimizer, method, rule)
                if not line.known:
                    continue
                edge = " (edge)" if tuned_rate.is_edge(line.runs[0], RATES[optimizer]) else ""
                beside = on_the_line(rows, optimizer, method, line.ratio)
                lines.append(
                    [
                        method,
                        rule,
                        spread(values(line.runs, "loss"), ".3f"),
                        f"{line.runs[0]['rate']:g}{edge}",
                        f"{line.ratio:.1f}",
                        f"{line.gap:+.3f}",
                        "" if rule in ("small", MORE) else f"{beside:+.3f}",
                    ]
                )
        head = ["method", "whole", "loss", "best rate", "times fewer bytes", "gap", "on the line"]
        text += f"**{name}**\n\n{table(head, lines)}\n" if lines else ""
    return text


def claims(rows: list[Row]) -> list[Claim]:
    """Say of each rule for how many methods and optimizers it is worth its bytes.

    Lines that send what the library's rule sends are left out: ``PowerSGD`` takes matrices only.
    """
    found = []
    for rule in (each for each in RULES if each != "small"):
        better = known = 0
        for optimizer in NAMES:
            for method in METHODS:
                line, usual = (Line(rows, optimizer, method, each) for each in (rule, "small"))
                if line.known and line.ratio != usual.ratio:
                    known += 1
                    better += line.gap < on_the_line(rows, optimizer, method, line.ratio)
        if known:
            text = f"whole: {rule}. Its gap is smaller than at as many bytes without it"
            said = f"{better} of {known} lines"
            found.append(Claim(text, "", said, "yes" if better > 0.75 * known else "no"))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the gap of each method and rule by its bytes."""
    marks = dict(zip((*RULES, MORE), "x.s^Do", strict=True))
    for place, optimizer in enumerate(NAMES):
        axes = figure.add_subplot(1, len(NAMES), place + 1)
        for number, method in enumerate(METHODS):
            lines = {r: Line(rows, optimizer, method, r) for r in (*RULES, MORE)}
            lines = {rule: line for rule, line in lines.items() if line.known}
            colour = plot_style.SERIES[number]
            ends = [lines[rule] for rule in ("small", MORE) if rule in lines]
            axes.plot([e.ratio for e in ends], [e.gap for e in ends], color=colour, label=method)
            for rule, line in lines.items():
                axes.plot(line.ratio, line.gap, marks[rule], color=colour)
        axes.set(title=NAMES[optimizer], xlabel="times fewer bytes", ylabel="loss above dense")
        axes.set_xscale("log")
    for rule, mark in marks.items():
        axes.plot([], [], mark, color="grey", label=f"whole: {rule}")
    plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(
        frame.main(
            Experiment("whole_tensors", ABOUT, cells, train, page, claims, draw, before=before)
        )
    )
