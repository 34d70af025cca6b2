"""Which optimizers bear which compression, and what momentum before compression brings.

    pip install schedulefree pytorch-optimizer                                  # for three of them
    python benchmarks/papers/optimizers.py --only part=momentum                 # EF21(momentum)
    python benchmarks/papers/optimizers.py --only part=table optimizer=muon     # some of the table
    python benchmarks/papers/optimizers.py                                      # what is missing

Four simulated workers. Every method under every optimizer has a learning rate of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import frame
import tasks  # noqa: F401 - sets the path
import torch
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict
from matplotlib.figure import Figure
from torch import nn
from torch.optim import Optimizer
from transformer import Transformer
from transformer_runs import Arm, run

from lightning_gc import (
    EF21,
    QSGD,
    BinMeans,
    ChunkedTopK,
    ErrorFeedback,
    Identity,
    NarrowResidual,
    PowerSGD,
    Quantised,
    Together,
    TopK,
)
from lightning_gc.methods import plot_style

DENSE = "dense"
BINS = Quantised(ChunkedTopK(), BinMeans(2))
TABLE = {
    DENSE: Arm(Identity()),
    "QSGD(6)": Arm(QSGD(6)),
    "QSGD(4)": Arm(QSGD(4)),
    "PowerSGD(4)": Arm(PowerSGD(4)),
    "TopK(0.01)": Arm(TopK(0.01)),
    "2-bit chunks": Arm(BINS),
    "H = 8": Arm(Identity(), every=8),
    "H = 32": Arm(Identity(), every=32),
}
"""Gradients in each step, or differences of weights every H steps."""
TWO_BITS = {
    "H = 8, 2 bits": Arm(BinMeans(2), every=8),
    "H = 32, 2 bits": Arm(BinMeans(2), every=32),
    "H = 8, 2-bit chunks": Arm(BINS, every=8),
    "H = 32, 2-bit chunks": Arm(BINS, every=32),
}
"""Between local steps, as MuLoCo sends; errors are fed back."""
MOMENTUM = {
    DENSE: (Arm(Identity()), (True, False)),
    "Residual()": (Arm(TopK(0.01), ErrorFeedback()), (True, False)),
    "NarrowResidual()": (Arm(TopK(0.01), NarrowResidual()), (True, False)),
    "EF21()": (Arm(TopK(0.01), EF21()), (True, False)),
    "EF21(momentum=0.1)": (Arm(TopK(0.01), EF21(0.1)), (True, False)),
    "EF21(momentum=0.3)": (Arm(TopK(0.01), EF21(0.3)), (False,)),
    "Residual(), 10 %": (Arm(TopK(0.1), ErrorFeedback()), (False,)),
    "EF21(), 10 %": (Arm(TopK(0.1), EF21()), (False,)),
    "EF21(momentum=0.1), 10 %": (Arm(TopK(0.1), EF21(0.1)), (False,)),
}
"""Memories of ``TopK(0.01)`` and ``TopK(0.1)``, and whether the optimizer has momentum."""
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (0.0015, 0.003, 0.006),
    "muon": (0.005, 0.01, 0.02),
    "sgd": (0.1, 0.3, 1.0),
    "lion": (0.0003, 0.001, 0.003),
    "schedule-free": (0.003, 0.006, 0.012),
    "soap": (0.0015, 0.003, 0.006),
}
FEW_RATES: dict[str, tuple[float, ...]] = {"adamw": (0.003, 0.006), "muon": (0.01, 0.02)}
"""Of part "momentum"."""
OPTIMIZERS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "sgd": "SGD",
    "lion": "Lion",
    "schedule-free": "schedule-free",
    "soap": "SOAP",
}
"""Names in the documentation."""
SENT = {
    DENSE: "uncompressed",
    "Residual()": "`ErrorFeedback()`",
    "2-bit chunks": "`Quantised(ChunkedTopK(), BinMeans(2))`",
    "H = 8": "weights every 8 steps",
    "H = 32": "weights every 32 steps",
    "H = 8, 2 bits": "weights every 8 steps, `BinMeans(2)`",
    "H = 32, 2 bits": "weights every 32 steps, `BinMeans(2)`",
    "H = 8, 2-bit chunks": "weights every 8 steps, `Quantised(ChunkedTopK(), BinMeans(2))`",
    "H = 32, 2-bit chunks": "weights every 32 steps, `Quantised(ChunkedTopK(), BinMeans(2))`",
}
"""Lines in the documentation; others are their code."""
ALONE = {"schedule-free"}
"""Optimizers whose local steps would need an exchange of the averaged weights: not run."""
MULOCO = ("adamw", "muon")
"""Optimizers that MuLoCo compares."""
DEGRADATION = 0.01
"""Share of the loss up to which two bits cost "next to nothing" here; MuLoCo names no figure."""
ABOUT = """
Four simulated workers train a transformer of two layers, 64 wide, with tied embeddings, on Python's
documentation. Each worker has four rows of 32 words in a step. The rate is warmed up over 5 % of
the steps and falls to zero in a cosine; a schedule-free rate does not fall. The mean gradient is
clipped at a norm of 1. *Loss* is the mean cross-entropy on the validation text. *Ratio* is how many
times fewer bytes a worker sends than dense. Every line is at its own rate, the best of three (of
two for *momentum before compression*) with the first seed.

AdamW and Lion have their defaults, SGD a momentum of 0.9. Muon (momentum 0.95, Nesterov,
`match_rms_adamw`) trains the matrices of the blocks, AdamW at 0.003 all other parameters. SOAP
and Lion are pytorch-optimizer's, the schedule-free AdamW is schedulefree's. SOAP has no
preconditioner for the 956 words of the embedding.

At H = 8 and 32 each worker makes H steps of its own, and weights are averaged. *2 bits* is
`BinMeans(2)`: every element is sent as the mean of its bin of four. *2-bit chunks* are 64 of every
4,096 elements in such bins. Both feed back their errors. AdamW's runs of *dense*, `QSGD(4)`,
`PowerSGD(4)`, `TopK(0.01)`, *2-bit chunks*, *H = 8* and *H = 32* are those of `adam.py` and
`local_steps.py`, which also tried 0.012 and found it worse. Seven of them were repeated: five are
equal to the last digit. Since then rounding has changed in `PowerSGD(4)` and *2-bit chunks*, whose
losses differ by 0.001 and 0.002.

An asterisk marks the lowest or highest rate of three. *n* is the number of seeds where there are
not three.
"""


HIDDEN = ("blocks", "lstm")


def muon(momentum: float, model: nn.Module, rate: float) -> Optimizer:
    """Return Muon for the hidden matrices and AdamW for other parameters, as one optimizer."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and name.startswith(HIDDEN)]
    others = [p for name, p in named if p.ndim != 2 or not name.startswith(HIDDEN)]
    own = torch.optim.Muon(
        matrices,
        lr=rate,
        weight_decay=0.01,
        momentum=momentum,
        nesterov=momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )
    first = 0.9 if momentum else 0.0
    return Together([own, torch.optim.AdamW(others, 0.003, betas=(first, 0.999))])


def make(kind: str, momentum: bool, model: Transformer, rate: float) -> Optimizer:
    """Return an optimizer of the model's parameters."""
    params: list[Any] = list(model.parameters())
    if kind == "muon":
        return muon(0.95 if momentum else 0.0, model, rate)
    if kind == "adamw":
        return torch.optim.AdamW(params, rate, betas=(0.9 if momentum else 0.0, 0.999))
    if kind == "sgd":
        return torch.optim.SGD(params, rate, momentum=0.9)
    if kind == "schedule-free":
        from schedulefree import AdamWScheduleFree  # type: ignore[import-not-found]

        found: Optimizer = AdamWScheduleFree(params, rate)
        found.train()  # type: ignore[attr-defined]
        return found
    import pytorch_optimizer  # type: ignore[import-not-found]

    made: Optimizer = (
        pytorch_optimizer.Lion(params, rate)
        if kind == "lion"
        else pytorch_optimizer.SOAP(params, rate, max_precondition_dim=512)
    )
    return made


def cells(seeds: int) -> list[Cell]:
    """Return the memories of part "momentum", then all optimizers of part "table"."""
    found = []
    for optimizer in ("adamw", "muon"):
        kinds = [
            {"part": "momentum", "optimizer": optimizer, "arm": arm, "momentum": inner}
            for arm, (_, momenta) in MOMENTUM.items()
            for inner in momenta
        ]
        rates = FEW_RATES[optimizer]
        found += [{**cell, "steps": 320} for cell in tuned_rate.cells(kinds, rates, seeds)]
    for optimizer, rates in RATES.items():
        kinds = [
            {"part": "table", "optimizer": optimizer, "arm": arm, "momentum": True}
            for arm, each in (TABLE | (TWO_BITS if optimizer in MULOCO else {})).items()
            if not (each.every and optimizer in ALONE)
        ]
        found += tuned_rate.cells(kinds, rates, seeds)
    return sorted(found, key=lambda cell: (cell["part"] == "table", cell["seed"] > 0))


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    rates = RATES if cell["part"] == "table" else FEW_RATES
    return tuned_rate.trials(cell, rates[cell["optimizer"]])


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    arms = TABLE | TWO_BITS | {name: arm for name, (arm, _) in MOMENTUM.items()}
    made = functools.partial(make, cell["optimizer"], cell["momentum"])
    arm = dataclasses.replace(arms[cell["arm"]], make=made)
    return run(arm, 4, rate=tuned_rate.rate(cell), steps=cell["steps"], seed=cell["seed"])


def best(rows: list[Row], part: str, optimizer: str, **kind: object) -> list[Row]:
    """Return a line's runs at its rate, that of seed 0 first; none if a rate was not tried yet."""
    kind |= {"part": part, "optimizer": optimizer}
    tried = {row["rate"] for row in frame.where(rows, **kind)}
    rates = (RATES if part == "table" else FEW_RATES)[optimizer]
    return tuned_rate.runs(rows, **kind) if tried.issuperset(rates) else []


def page(rows: list[Row]) -> str:
    """Return a table for each part: methods by optimizers."""
    text = ""
    kinds = [name for name in RATES if best(rows, part="table", optimizer=name)]
    if kinds:
        lines = []
        for arm in TABLE | TWO_BITS:
            line, ratio = [arm], math.nan
            for kind in kinds:
                runs = best(rows, part="table", optimizer=kind, arm=arm)
                line.append(_cell(runs, RATES[kind]))
                dense = best(rows, part="table", optimizer=kind, arm=DENSE)
                if runs and dense:
                    ratio = dense[0]["bytes"] / runs[0]["bytes"]
            lines.append([*line, "–" if math.isnan(ratio) else f"{ratio:.0f}"])
        text += f"**Optimizers, 640 steps**\n\n{table(['sent', *kinds, 'ratio'], lines)}\n"
    lines = []
    for optimizer in ("adamw", "muon"):
        for arm, (_, momenta) in MOMENTUM.items():
            shown = {}
            for inner in momenta:
                runs = best(rows, part="momentum", optimizer=optimizer, arm=arm, momentum=inner)
                shown[inner] = _cell(runs, FEW_RATES[optimizer])
            lines.append([optimizer, arm, shown.get(True, ""), shown.get(False, "")])
    head = ["optimizer", "`TopK`, 1 %, with", "its momentum", "without"]
    return f"{text}**Momentum before compression, 320 steps**\n\n{table(head, lines)}\n"


def _cell(runs: list[Row], rates: tuple[float, ...]) -> str:
    """Return the loss over seeds, the rate, a mark if that is at the edge, the number of seeds."""
    if not runs:
        return ""
    edge = "*" if len(rates) > 2 and tuned_rate.is_edge(runs[0], rates) else ""
    number = "" if len(runs) == 3 else f" (n = {len(runs)})"
    return f"{spread(values(runs, 'loss'), '.3f')} at {runs[0]['rate']:g}{edge}{number}"


def document(rows: list[Row], stem: Path) -> None:
    """Write the documentation's tables of mean losses: two decimals where seeds are missing."""
    if stem.parent != frame.RESULTS:
        return
    kinds = {"part": "table"}
    columns: dict[str, dict[str, Any]] = {
        head: {"optimizer": name}
        for name, head in OPTIMIZERS.items()
        if best(rows, optimizer=name, **kinds)
    }
    dense = best(rows, optimizer="adamw", arm=DENSE, **kinds)
    lines = []
    for arm in TABLE | TWO_BITS:
        runs = [best(rows, arm=arm, **column, **kinds) for column in columns.values()]
        if any(runs):
            fewer = dense[0]["bytes"] / next(filter(None, runs))[0]["bytes"]
            lines.append([SENT.get(arm, f"`{arm}`"), f"{fewer:.0f}", *map(_mean, runs)])
    _write("optimizers", table(["sent", "fewer bytes", *columns], lines))
    columns = {
        "AdamW, β₁ = 0.9": {"optimizer": "adamw", "momentum": True},
        "AdamW, β₁ = 0": {"optimizer": "adamw", "momentum": False},
        "Muon, momentum 0.95": {"optimizer": "muon", "momentum": True},
        "Muon, momentum 0": {"optimizer": "muon", "momentum": False},
    }
    lines = []
    for arm in MOMENTUM:
        runs = [best(rows, part="momentum", arm=arm, **column) for column in columns.values()]
        if any(runs):
            memory, _, share = arm.partition(", ")
            name = SENT.get(memory, f"`{memory}`")
            sent = "100 %" if arm == DENSE else share or "1 %"
            lines.append([name, sent, *map(_mean, runs)])
    _write("optimizers_momentum", table(["memory", "elements", *columns], lines))


def _mean(runs: list[Row]) -> str:
    """Return the mean loss, with three decimals if there are three seeds."""
    found = values(runs, "loss")
    return f"{statistics.mean(found):.{3 if len(found) > 2 else 2}f}" if found else ""


def _write(name: str, text: str) -> None:
    (frame.IMAGES.parent / "tables" / "measured" / f"{name}.md").write_text(text)


def claims(rows: list[Row]) -> list[Claim]:
    """Compare memories, optimizers, and what two bits cost between local steps."""
    found = []

    def compare(text: str, one: list[Row], other: list[Row]) -> None:
        n = min(len(one), len(other))
        mine, base = values(one[:n], "loss"), values(other[:n], "loss")
        if n > 1:
            said = f"{spread(mine, '.3f')} against {spread(base, '.3f')}"
            found.append(Claim(text, "", said, verdict(mine, base)))

    for optimizer in ("adamw", "muon"):
        kind = {"part": "momentum", "optimizer": optimizer}
        for share in ("", ", 10 %"):
            mine = best(rows, arm=f"EF21(momentum=0.1){share}", momentum=False, **kind)
            for arm in ("EF21()", "Residual()", "NarrowResidual()"):
                for inner in (True, False):
                    other = best(rows, arm=arm + share, momentum=inner, **kind)
                    its = "with its momentum" if inner else "without momentum"
                    text = f"{optimizer}: EF21(momentum=0.1) is better than {arm}, {its}{share}"
                    compare(text, mine, other)
    kind = {"part": "table"}
    for arm in TABLE | TWO_BITS:
        muon, adamw = (best(rows, arm=arm, optimizer=o, **kind) for o in MULOCO[::-1])
        compare(f"{arm}: Muon is better than AdamW", muon, adamw)
    return found + _muloco(rows)


def _muloco(rows: list[Row]) -> list[Claim]:
    """Return what two bits cost between local steps, as a share of the loss and beside AdamW."""
    found = []
    for arm in TWO_BITS:
        steps, _, bits = arm.partition(", ")
        costs = {}
        for optimizer in MULOCO[::-1]:
            kind = {"part": "table", "optimizer": optimizer}
            two, whole = (best(rows, arm=a, **kind) for a in (arm, steps))
            pairs = list(zip(values(two, "loss"), values(whole, "loss"), strict=False))
            costs[optimizer] = [a - b for a, b in pairs]
            if len(pairs) > 1:
                said = f"{spread(costs[optimizer], '+.3f')} of {pairs[0][1]:.3f}"
                bearable = [(1 + DEGRADATION) * b for _, b in pairs]
                text = f"{optimizer}, {steps}: {bits} cost less than {DEGRADATION:.0%} of the loss"
                theirs = "next to no degradation" if optimizer == "muon" else ""
                found.append(Claim(text, theirs, said, verdict([a for a, _ in pairs], bearable)))
        muon, adamw = costs["muon"], costs["adamw"]
        n = min(len(muon), len(adamw))
        if n > 1:
            said = f"{spread(muon[:n], '+.3f')} against {spread(adamw[:n], '+.3f')}"
            text = f"{steps}: {bits} cost Muon less than AdamW"
            found.append(Claim(text, "", said, verdict(muon[:n], adamw[:n])))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the losses of methods, a colour an optimizer."""
    figure.set_size_inches(plot_style.WIDTH, 6.6)
    ax = figure.subplots()
    for index, optimizer in enumerate(RATES):
        found = [
            (best(rows, part="table", optimizer=optimizer, arm=arm), place)
            for place, arm in enumerate(TABLE | TWO_BITS)
        ]
        points = [(loss, place) for runs, place in found for loss in values(runs, "loss")]
        if points:
            colour = plot_style.SERIES[index % len(plot_style.SERIES)]
            ax.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.8, label=optimizer)
    ax.set_yticks(range(len(TABLE | TWO_BITS)), list(TABLE | TWO_BITS))
    ax.invert_yaxis()
    ax.set(xlabel="validation loss")
    if ax.has_data():
        plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(
        frame.main(
            Experiment(
                "optimizers", ABOUT, cells, train, page, claims, draw, before=before, after=document
            )
        )
    )
