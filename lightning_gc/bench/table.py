"""Table of a comparison: seconds, speed-up, bytes and loss per method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_gc.bench.baselines import NONE, PLAIN

Rows = Mapping[str, Mapping[str, Any]]
COLUMNS = ("", "s per step", "times faster than DDP", "times the limit", "bytes per step", "loss")
FOOTNOTE = "* computed; the others are counted"


def cells(rows: Rows) -> list[list[str]]:
    """Return the texts of each row.

    Args:
        rows: by method ``seconds`` and ``bytes``; where known ``low`` and ``high``, the quartiles
            of the seconds, ``source``, ``"computed"`` if bytes are not counted, and ``loss``.
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
