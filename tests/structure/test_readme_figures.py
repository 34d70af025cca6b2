"""The picture and the table at the top of README are those of the newest measurements."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
RESULTS = "time_to_loss_lstm8_200_20261123.md"
SHOWN = {
    "plain DDP": "plain DDP",
    "torch's PowerSGD hook": "torch PowerSGD hook",
    "QSGD(4)": "QSGD(4)",
    "TopK(0.01)": "TopK(0.01)",
}
"""Rows of README's table by their names in the results."""


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("network_plot")


def test_pictures_are_drawn_from_them(plot: Any) -> None:
    drawn = plot.in_words(plot.seconds(plot.newest()))
    for name in ("light", "dark", "light_narrow", "dark_narrow"):
        image = (ROOT / "docs" / "images" / f"network_{name}.svg").read_text()
        assert drawn in image, "stale: run python benchmarks/network_plot.py"


def rows_of(text: str) -> dict[str, list[str]]:
    """Return first cell -> other cells of a page's tables, without markup."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {first.split("`,")[0]: others for first, *others in cells}


def test_seconds_to_a_loss_are_the_measured_ones() -> None:
    found = rows_of((ROOT / "benchmarks" / "results" / RESULTS).read_text())
    assert RESULTS in README
    shown = rows_of((ROOT / "README.md").read_text())
    for ours, theirs in SHOWN.items():
        measured = [float(cell.split(" ± ")[0]) for cell in found[theirs][-3:]]
        assert [abs(float(a) - b) <= 0.55 for a, b in zip(shown[ours], measured, strict=True)] == [
            True
        ] * 3, ours


def test_shares_of_the_bytes_are_those_of_the_same_model(plot: Any) -> None:
    part = next(
        part
        for part in json.loads(plot.newest().read_text())
        if (part["workers"], part["model"], part["link"]) == (2, "lstm8", "1 Gbit/s")
    )
    dense = part["rows"]["plain DDP"]["bytes"]
    for method, ratio in (("QSGD(4)", 8), ("TopK(0.01)", 72)):
        assert f"`{method}`, 1/{ratio} of the bytes" in README
        assert abs(dense / part["rows"][method]["bytes"] - ratio) < 0.6, method
