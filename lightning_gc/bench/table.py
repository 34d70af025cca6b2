"""The table of a comparison, as cells; in Markdown or for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from lightning_gc.bench.baselines import NONE, PLAIN

Rows = Mapping[str, Mapping[str, Any]]
COLUMNS = (
    "",
    "s per step",
    "times faster than DDP",
    "times the limit",
    "bytes per step",
    "loss",
)


def cells(rows: Rows) -> list[list[str]]:
    """Return a list of texts per method.

    Args:
        rows: by method ``seconds`` and ``bytes``; where known ``low`` and ``high``, the quartiles
            of the seconds, ``source``, ``"computed"`` where bytes are not counted, and ``loss``.
    """
    plain, limit = (rows.get(name, {}).get("seconds", math.nan) for name in (PLAIN, NONE))
    found = []
    for method, row in rows.items():
        spread = f" ({row['low']:.4f}-{row['high']:.4f})" if "low" in row else ""
        star = "*" if row.get("source") == "computed" else ""
        found.append(
            [
                method,
                f"{row['seconds']:.4f}{spread}",
                f"{plain / row['seconds']:.2f}",
                f"{row['seconds'] / limit:.2f}",
                f"{row['bytes']:,.0f}{star}",
                f"{row['loss']:.3f}" if "loss" in row else "",
            ]
        )
    return found


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    text = "|" + "|".join(f" {column} " if column else " " for column in columns) + "|\n"
    text += "|---" + "|---:" * (len(columns) - 1) + "|\n"
    return text + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def terminal(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Return the same for a terminal."""
    table = Table(caption="* computed; the others are counted")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table
