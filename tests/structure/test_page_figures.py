"""Figures on pages are those of the results that the pages name."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMED = re.compile(r"`(benchmarks/results/papers/\w+_\d{8}\.md)`")
LOSS = re.compile(r"\d\.\d{3} ± \d\.\d{3}")


def test_losses_are_those_of_the_named_results() -> None:
    text = (DOCS / "measurements-training.md").read_text().partition("\n## Tuning each")[0]
    measured = "".join((ROOT / name).read_text() for name in NAMED.findall(text))
    losses = LOSS.findall(text)
    assert len(losses) > 80
    assert [loss for loss in losses if loss not in measured] == []


def test_deviations_are_on_the_pages_of_measurements_only() -> None:
    allowed = {"evidence.md", "measurements.md", "measurements-training.md", "gpus.md", "papers.md"}
    pages = [*DOCS.glob("*.md"), *(DOCS / "tutorials").glob("*.md")]
    assert [p.name for p in pages if "±" in p.read_text() and p.name not in allowed] == []


def test_the_method_called_nearly_fastest_is() -> None:
    """On slow links, of all methods in the newest measurement of two workers and the LSTM."""
    text = " ".join((DOCS / "choosing-a-compressor.md").read_text().split())
    claim = (
        "took at most 1.1 times as long as the fastest method measured at 100 Mbit/s and 1 Gbit/s"
    )
    (name,) = re.findall(rf"\*\*`(\w+)`\*\* {claim}", text)
    name = {"TopK": "TopK(0.01)"}[name]
    newest = max((ROOT / "benchmarks" / "results").glob("network_*.json"))
    for part in json.loads(newest.read_text()):
        if (part["workers"], part["model"]) == (2, "lstm8") and part["link"] != "10 Gbit/s":
            rows = {n: r["seconds"] for n, r in part["rows"].items() if n != "no synchronisation"}
            assert rows[name] <= 1.1 * min(rows.values()), part["link"]
