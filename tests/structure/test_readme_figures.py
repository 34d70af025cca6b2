"""The picture and the sentence at the top of README are those of the newest measurements."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("network_plot")


def test_pictures_are_drawn_from_them(plot: Any) -> None:
    drawn = plot.in_words(plot.seconds(plot.newest()))
    for name in ("light", "dark", "light_narrow", "dark_narrow"):
        image = (ROOT / "docs" / "images" / f"network_{name}.svg").read_text()
        assert drawn in image, "stale: run python benchmarks/network_plot.py"


def test_sentence_holds_for_the_picture(plot: Any) -> None:
    rows = plot.seconds(plot.newest())
    ours = [name for name, (_, colour) in plot.METHODS.items() if colour == plot.OURS]
    slow = [rows[link]["plain DDP"] / rows[link][m] for link in plot.LINKS[:2] for m in ours]
    assert f"{min(slow):.1f} to {max(slow):.0f} times as fast as with plain DDP" in README
    fast = rows["10 Gbit/s"]
    most = max(fast["plain DDP"] / fast[method] for method in ours)
    assert f"At 10 Gbit/s none of them was more than {most:.2f} times as fast" in README


def test_sentence_holds_for_what_is_not_in_the_picture(plot: Any) -> None:
    theirs = ("no synchronisation", "plain DDP", "torch", "GRACE")
    factors = [
        part["rows"]["plain DDP"]["seconds"] / row["seconds"]
        for part in json.loads(plot.newest().read_text())
        if (part["workers"], part["model"]) != (2, "lstm8")
        and part["link"] in ("100 Mbit/s", "1 Gbit/s")
        for name, row in part["rows"].items()
        if not name.startswith(theirs)
    ]
    assert f"they were {min(factors):.1f} to {max(factors):.0f} times as fast" in README
