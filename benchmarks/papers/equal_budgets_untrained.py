"""Run again, with one thing changed at a time, the draws of the comparison that did not train.

    python benchmarks/papers/equal_budgets_untrained.py --jobs 2

Which draws these are is read from the rows of equal_budgets.py (`--rows`).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import frame
from cell_runs import read
from equal_budgets import run
from equal_budgets_methods import DENSE, MEMORY_MOMENTUM, METHODS, sends_directions
from equal_budgets_models import MODELS
from equal_budgets_points import BEST, trained
from frame import Cell, Claim, Experiment, Row, table, where
from matplotlib.figure import Figure

from lightning_gc.methods import plot_style

Settings = dict[str, Any]
Change = Callable[[Cell, Settings], tuple[Cell, Settings] | None]
LONGER, SLOWER = 4, 8
PLACE = ("model", "method", "draw", "draws", "workers", "width", "epochs", "steps", "seed")
COPIED = (*PLACE, "settings")
AS_DRAWN = "as drawn"
ABOUT = f"""
Some draws of `equal_budgets.py` did not train: after the run, the training loss was no lower than
that of a guess at equal odds. Each of them is run again with the same seed: as drawn, and with one
change at a time. Validation losses at the end of the run, in bold where it trained; one seed. A run
that fails may go another way on another machine, and then sends another number of bytes.

- *dense*: nothing compressed, at the same rate and momentum, that of the memory included.
- *small dense*: tensors of few elements are not compressed, which limits the ratio.
- *rate / {SLOWER}*: the method at an eighth of the learning rate.
- *no momentum*: of the optimizer; SGD's rate is raised by 1 / (1 − momentum), which is how much
  longer momentum makes its steps.
- *steps × {LONGER}*: four times the epochs; the ResNet's warm-up stays three of them.
"""


def momentum_of(settings: Settings) -> float:
    """Return the momentum of memory or optimizer."""
    return float(settings.get(MEMORY_MOMENTUM) or settings.get("momentum", 0.0))


def dense(cell: Cell, settings: Settings) -> tuple[Cell, Settings] | None:
    """Compress nothing; a memory's momentum becomes the optimizer's, or lengthens its steps."""
    if sends_directions(cell["method"]):
        return None  # a gradient of another length has other rates
    rate, momentum = settings["rate"], momentum_of(settings)
    if MODELS[cell["model"]].momenta:
        return cell | {"method": DENSE}, {"rate": rate, "momentum": momentum}
    return cell | {"method": DENSE}, {"rate": rate / (1 - momentum)}


def small_dense(cell: Cell, settings: Settings) -> tuple[Cell, Settings] | None:
    """Leave small tensors uncompressed, if they are not."""
    return (cell, settings | {"every_tensor": False}) if settings.get("every_tensor") else None


def slower(cell: Cell, settings: Settings) -> tuple[Cell, Settings]:
    """Lower the learning rate."""
    return cell, settings | {"rate": settings["rate"] / SLOWER}


def without_momentum(cell: Cell, settings: Settings) -> tuple[Cell, Settings] | None:
    """Take the optimizer's momentum away, if it has any."""
    momentum = settings.get("momentum")
    if not momentum:
        return None
    factor = 1.0 if MODELS[cell["model"]].rates_for is None else 1 / (1 - momentum)
    return cell, settings | {"momentum": 0.0, "rate": settings["rate"] * factor}


def longer(cell: Cell, settings: Settings) -> tuple[Cell, Settings]:
    """Train for more epochs; a schedule of the learning rate is stretched."""
    return cell | {"epochs": LONGER * cell["epochs"]}, settings


CHANGES: dict[str, Change] = {
    AS_DRAWN: lambda cell, settings: (cell, settings),
    "dense": dense,
    "small dense": small_dense,
    f"rate / {SLOWER}": slower,
    "no momentum": without_momentum,
    f"steps × {LONGER}": longer,
}


def cells(seeds: int, rows: Path) -> list[Cell]:
    """Return every change of every draw that did not train; ``seeds`` is that of the draws."""
    found = []
    for row in read(rows):
        if row["draw"] == BEST or trained(row):
            continue
        cell = {name: row[name] for name in COPIED}
        found += [
            cell | {"change": name}
            for name, change in CHANGES.items()
            if change(cell, cell["settings"])
        ]
    return found


def train(cell: Cell, data: Path | None) -> Row:
    """Run a draw with a change."""
    changed = CHANGES[cell["change"]](cell, cell["settings"])
    assert changed is not None  # is no cell
    return run(*changed)


def page(rows: list[Row]) -> str:
    """Return how many draws each change helps, and all losses."""
    text = ""
    for model in MODELS:
        if some := where(rows, model=model):
            text += f"## {model}\n\n{summary(some)}\n\n{losses(some)}\n"
    return text


def summary(rows: Sequence[Row]) -> str:
    """Say how many draws train with each change."""
    drawn_rows = where(rows, change=AS_DRAWN)
    parts = []
    for change in CHANGES:
        if change != AS_DRAWN and (some := where(rows, change=change)):
            helped = sum(map(trained, some))
            parts.append(f"{helped} of {len(some)} train with *{change}*")
    still = sum(not trained(row) for row in drawn_rows)
    return f"{still} of {len(drawn_rows)} do not train when run again as drawn; {', '.join(parts)}."


def losses(rows: Sequence[Row]) -> str:
    """Return the loss of each draw with each change."""
    lines = []
    for row in in_order(rows):
        same = {"method": row["method"], "draw": row["draw"]}
        found = {r["change"]: r for r in where(rows, **same)}
        shown = [loss(found.get(change)) for change in CHANGES]
        sent = "–" if row.get("ratio") is None else f"{row['ratio']:,.1f}"
        settings = [f"{x:.3g}" for x in (row["settings"]["rate"], momentum_of(row["settings"]))]
        lines.append([f"{row['method']} {row['draw']}", sent, *settings, *shown])
    return table(["method, draw", "ratio", "rate", "momentum", *CHANGES], lines)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the runs as drawn, by method."""
    place = list(METHODS).index
    return sorted(where(rows, change=AS_DRAWN), key=lambda r: (place(r["method"]), r["draw"]))


def loss(row: Row | None) -> str:
    """Return a run's validation loss, bold if it trained."""
    if row is None:
        return "–"
    shown = "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
    return f"**{shown}**" if trained(row) else shown


def claims(rows: list[Row]) -> list[Claim]:
    """Return nothing: this is not held against a paper."""
    return []


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw each draw's losses on a line, a panel a model; filled where the run trained."""
    run_models = [model for model in MODELS if where(rows, model=model)]
    height = max(len(in_order(where(rows, model=model))) for model in run_models)
    figure.set_size_inches(plot_style.WIDTH, (0.7 + 0.19 * height) * len(run_models))
    panels = figure.subplots(len(run_models), 1, squeeze=False)[:, 0]
    for ax, model in zip(panels, run_models, strict=True):
        some = where(rows, model=model)
        lines = {(r["method"], r["draw"]): y for y, r in enumerate(reversed(in_order(some)))}
        for change, colour in zip(CHANGES, plot_style.SERIES, strict=False):
            shown = [r for r in where(some, change=change) if r["loss"] is not None]
            ax.scatter(
                [r["loss"] for r in shown],
                [lines[r["method"], r["draw"]] for r in shown],
                s=22,
                edgecolors=colour,
                facecolors=[colour if trained(r) else "none" for r in shown],
            )
            ax.scatter([], [], s=22, color=colour, label=change)
        ax.set_yticks(range(len(lines)), [f"{m} {d}" for m, d in lines])
        plot_style.plain_log(ax.xaxis)
        ax.set(title=model, xlabel="validation loss")
    plot_style.legend(figure)


def main() -> int:
    """Run what is missing, write page and plot."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=Path, default=frame.RESULTS / "equal_budgets.jsonl")
    options, sys.argv[1:] = parser.parse_known_args()
    return frame.main(
        Experiment(
            "equal_budgets_untrained",
            ABOUT,
            functools.partial(cells, rows=options.rows),
            train,
            page,
            claims,
            draw,
            seeds=1,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
