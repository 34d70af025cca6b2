"""Levels that a controller has chosen, for loggers: metrics, and a Markdown table."""

from __future__ import annotations

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


def as_markdown(decision: Decision, levels: Mapping[str, float | None]) -> str:
    """Return the reason and a table of levels for TensorBoard's text page."""
    rows = [
        f"| {name} | {'uncompressed' if level is None else f'{level:g}'} |"
        for name, level in levels.items()
    ]
    return "\n".join([decision.reason, "", "| parameter | level |", "|---|---|", *rows])
