"""Decisions of a controller, formatted for loggers: metrics, and a Markdown table of levels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from lightning_gc.controllers import Decision


def level_figures(levels: Mapping[str, float | None]) -> dict[str, float]:
    """Return median, minimum and maximum level, and the share of those that are uncompressed."""
    numbers = [level for level in levels.values() if level is not None]
    figures = {"uncompressed_share": 1 - len(numbers) / len(levels)} if levels else {}
    if numbers:
        figures["level"] = statistics.median(numbers)
        figures["level_min"], figures["level_max"] = min(numbers), max(numbers)
    return figures


def decision_figures(decision: Decision) -> dict[str, float]:
    """Return the decision's finite figures, by name."""
    return {name: value for name, value in decision.figures.items() if math.isfinite(value)}


def as_markdown(decision: Decision, levels: Mapping[str, float | None]) -> str:
    """Return the reason and a table of levels for TensorBoard's text page."""
    rows = [
        f"| {name} | {'uncompressed' if level is None else f'{level:g}'} |"
        for name, level in levels.items()
    ]
    return "\n".join([decision.reason, "", "| parameter | level |", "|---|---|", *rows])
