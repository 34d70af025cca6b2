"""Losses on pages are those of the results that the pages name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(?:benchmarks/results/papers/)?((?:adam|local_steps|local_delay|equal_budgets)_\d{8}\.md)`")
LOSS = re.compile(r"\d\.\d{3} ± \d\.\d{3}")


@pytest.mark.parametrize("page", ["measurements-training.md", "local-steps.md"])
def test_losses_are_those_of_the_named_results(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = [ROOT / "benchmarks" / "results" / "papers" / name for name in NAMED.findall(text)]
    assert named
    measured = "".join(path.read_text() for path in named)
    losses = LOSS.findall(text)
    assert len(losses) > 10
    assert [loss for loss in losses if loss not in measured] == []
