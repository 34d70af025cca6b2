"""The picture and the table at the top of README are those of the newest measurements."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = " ".join((ROOT / "docs" / "will-it-help.md").read_text().replace("**", "").split())
TO_LOSS = ROOT / "benchmarks" / "results" / "time_to_loss_lstm8_200_20261123.md"
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


def rows(text: str) -> dict[str, list[str]]:
    """Return first cell -> the other cells, of every row of every table."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0].replace("`", ""): row[1:] for row in cells if row}


def measured() -> dict[str, list[float]]:
    """Return method -> seconds to plain DDP's loss on three links."""
    found = rows(TO_LOSS.read_text())
    methods = [name for name, cells in found.items() if len(cells) == 5 and "±" in cells[-1]]
    return {m: [float(cell.split()[0]) for cell in found[m][2:]] for m in methods}


@pytest.mark.parametrize("page", ["README.md", "docs/will-it-help.md"])
def test_seconds_to_the_loss_are_the_measured_ones(page: str) -> None:
    text = (ROOT / page).read_text().replace("**", "")
    _, table = text.split("plain DDP after 200 steps |")
    shown = rows(table.partition("\n\n")[0])
    compared = 0
    for name, expected in measured().items():
        for label, cells in shown.items():
            if label.replace("torch's", "torch").partition(",")[0] == name:
                seconds = [float(cell) for cell in cells[-3:]]
                assert seconds == pytest.approx(expected, abs=0.5001), label  # rounded
                compared += 1
    assert compared >= 4


def test_shares_of_bytes_are_the_measured_ones(plot: Any) -> None:
    parts = json.loads(plot.newest().read_text())
    of_two = next(p["rows"] for p in parts if (p["workers"], p["model"]) == (2, "lstm8"))
    dense = of_two["plain DDP"]["bytes"]
    said = dict(re.findall(r"^\| `(\w+\([\d.]+\))`, 1/(\d+) of the bytes", README, re.M))
    assert set(said) == {"QSGD(4)", "TopK(0.01)"}
    for method, share in said.items():
        assert f"{dense / of_two[method]['bytes']:.0f}" == share
