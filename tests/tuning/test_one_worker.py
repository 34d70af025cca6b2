"""One worker sends nothing: methods are compared by what its gradients take when encoded."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_gc.compressors import Range
from lightning_gc.tuning import Method, report
from lightning_gc.tuning.studies import RULES, best_trial
from tests.support.tuning import QUIET, compare, denser

GRADIENT = 4 * (64 * 64 + 64) * 2  # bytes of two steps, in float32
ALONE: Any = {"workers": 1, "build": denser, "trainer": {**QUIET, "max_epochs": 1}}


def wide(**changes: Any) -> Method:
    return Method("randomk", space=(Range("density", 1e-3, 0.9, scale="log"),), **changes)


def encoded(density: float) -> float:
    """Return the bytes of as many gradients: values of the matrix, and the bias whole."""
    return 4 * (round(density * 4096) + 64) * 2


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_against_encoded_bytes_the_front_is_where_less_costs_more(journal: Path) -> None:
    studies = compare(journal, wide(), trials=7, objective="pareto", **ALONE)
    study = studies["randomk"]
    assert study.user_attrs[RULES]["bytes_counted"] == "encoded_bytes"
    for trial in study.trials:
        known, expected = trial.user_attrs, encoded(trial.params["compressor.density"])
        assert known["wire_bytes"] == 0
        assert known["encoded_bytes"] == pytest.approx(expected)
        assert known["encoding_ratio"] == pytest.approx(GRADIENT / expected)
        assert trial.values[1] == pytest.approx(math.log10(expected))
    assert 1 < len(study.best_trials) < 7
    assert min(study.trials, key=lambda t: t.values[1]) in study.best_trials
    report(journal, journal.with_name("out"))
    dense, ours = rows(journal.with_name("out"), "results")
    assert (dense["ratio"], dense["encoding_ratio"], dense["wire_bytes"]) == ("", "1.0", "0.0")
    assert float(ours["encoding_ratio"]) > 1
    points = rows(journal.with_name("out"), "metric_against_ratio")
    front = [p for p in points if p["on_front"] == "True"]
    assert {float(p["encoding_ratio"]) for p in front} > {1.0}
    assert min(points, key=lambda p: float(p["encoded_bytes"])) in front
    text = (journal.with_name("out") / "report.md").read_text()
    assert "encoding ratio" in text
    assert "With one worker nothing is sent" in text
    assert "| ratio |" not in text


def test_a_budget_bounds_what_is_encoded(journal: Path) -> None:
    allowed = encoded(0.1)
    method = wide(budget=allowed)
    study = compare(journal, method, trials=7, pruner="none", **ALONE)["randomk"]
    within = {t.number for t in study.trials if encoded(t.params["compressor.density"]) <= allowed}
    assert 0 < len(within) < 7
    assert {t.number for t in study.trials if t.state.name == "COMPLETE"} == within
    winner = best_trial(study)
    assert winner is not None
    assert winner.number == min(within, key=lambda number: study.trials[number].values[0])
    reasons = {t.user_attrs["reason"] for t in study.trials if t.number not in within}
    assert all("bytes encoded, the budget is" in reason for reason in reasons)
