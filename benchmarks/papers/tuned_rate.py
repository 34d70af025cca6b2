"""Choose each method's learning rate with seed 0, and run the other seeds at that rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from frame import Cell, Row, where

TUNED = "tuned"  # stands for the rate in the cells of seeds 1, 2, ...


def cells(kinds: Iterable[Cell], rates: Sequence[float], seeds: int) -> list[Cell]:
    """Return all kinds: seed 0 at every rate, the others at the chosen one."""
    kinds = list(kinds)
    return [
        {**kind, "rate": rate, "steps": 640, "seed": seed}
        for seed in range(seeds)
        for kind in kinds
        for rate in (rates if seed == 0 else (TUNED,))
    ]


def trials(cell: Cell, rates: Sequence[float]) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    tuned = cell["rate"] == TUNED
    return [{**cell, "rate": rate, "seed": 0} for rate in rates] if tuned else []


def rate(cell: Cell) -> float:
    """Return a cell's rate; its trials are in ``cell["before"]``."""
    return float(min(cell["before"], key=_loss)["rate"] if cell["rate"] == TUNED else cell["rate"])


def runs(rows: Iterable[Row], **kind: object) -> list[Row]:
    """Return a kind's runs at its chosen rate, that of seed 0 first; none if it was not run."""
    mine = where(rows, **kind)
    first = [row for row in mine if row["rate"] != TUNED]
    return [min(first, key=_loss), *where(mine, rate=TUNED)] if first else []


def is_edge(run: Row, rates: Sequence[float]) -> bool:
    """Say whether the chosen rate is the lowest or the highest tried."""
    return run["rate"] in (min(rates), max(rates))


def _loss(row: Row) -> float:
    return math.inf if row["loss"] is None else float(row["loss"])
