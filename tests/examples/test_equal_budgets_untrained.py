"""Draws of the comparison that did not train: which are run again, and with what changed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import equal_budgets
import equal_budgets_untrained as untrained
from equal_budgets_methods import drawn


def a_cell(model: str, method: str) -> dict[str, Any]:
    """Return the cell of a study's first draw."""
    first = {"model": model, "method": method, "draw": 0}
    return next(cell for cell in equal_budgets.cells(0) if first.items() <= cell.items())


def changes(path: Path, **figures: Any) -> list[tuple[str, str]]:
    """Return model and change of the runs that these figures of two draws ask for."""
    some = [a_cell("lstm", "sign_sgd"), a_cell("resnet", "topk")]
    rows = [{"cell": cell, "figures": figures | drawn_settings(cell), "cpu": 1.0} for cell in some]
    rows.append({"cell": some[0] | {"draw": "best"}, "figures": {"loss": 99.0}, "cpu": 1.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [(cell["model"], cell["change"]) for cell in untrained.cells(1, path)]


def drawn_settings(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell, as its row has them; small tensors are compressed."""
    found = drawn(cell["method"], cell["model"], 0, cell["draws"])
    return {"settings": found | ({"every_tensor": True} if "every_tensor" in found else {})}


@pytest.mark.parametrize(
    "figures",
    [
        {"loss": 2.0, "train_loss": 7.7},
        {"loss": None, "train_loss": None},
        {"loss": None, "error": "ValueError: no"},
    ],
)
def test_draws_that_did_not_train_are_run_again(tmp_path: Path, figures: dict[str, Any]) -> None:
    found = changes(tmp_path / "rows.jsonl", **figures)
    # A direction has rates that say nothing about dense; the LSTM's optimizer has no momentum.
    lstm = [("lstm", change) for change in ("as drawn", "rate / 8", "steps × 4")]
    assert found == lstm + [("resnet", change) for change in untrained.CHANGES]


def test_draws_that_trained_are_not(tmp_path: Path) -> None:
    assert changes(tmp_path / "rows.jsonl", loss=9.0, train_loss=2.2) == []


def test_one_thing_is_changed() -> None:
    cell = a_cell("resnet", "topk")
    given = drawn_settings(cell)["settings"]
    rate = given["rate"]

    def changed(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the change does to cell and settings."""
        found = untrained.CHANGES[name](cell, given)
        assert found is not None
        new_cell, new = found
        return (
            {name: value for name, value in new_cell.items() if value != cell[name]},
            {name: value for name, value in new.items() if value != given[name]},
        )

    assert changed("as drawn") == ({}, {})
    assert changed("rate / 8") == ({}, {"rate": rate / 8})
    assert changed("steps × 4") == ({"epochs": 4 * cell["epochs"]}, {})
    in_a_row, settings = changed("no momentum")
    assert in_a_row == {}
    assert settings == {"momentum": 0.0, "rate": pytest.approx(10 * rate)}
    assert changed("dense") == ({"method": "identity"}, {})
    assert changed("small dense") == ({}, {"every_tensor": False})
    assert untrained.small_dense(cell, {"rate": 0.1, "every_tensor": False}) is None


def test_dense_has_the_memorys_momentum() -> None:
    with_momentum = {"rate": 0.1, "momentum": 0.0, "memory.momentum": 0.75}
    dense = untrained.dense(a_cell("resnet", "dgc"), with_momentum)
    assert dense is not None
    assert dense[1] == {"rate": 0.1, "momentum": 0.75}
    dense = untrained.dense(a_cell("lstm", "dgc"), {"rate": 0.1, "memory.momentum": 0.75})
    assert dense is not None
    assert dense[1] == {"rate": pytest.approx(0.4)}  # longer steps in momentum's place


def test_the_page_says_what_trains() -> None:
    losses = {
        "as drawn": 2.5,
        "dense": 0.3,
        "small dense": 2.31,
        "rate / 8": 1.0,
        "no momentum": None,
        "steps × 4": 2.4,
    }
    rows = [
        {
            **a_cell("resnet", "topk"),
            "change": change,
            "loss": loss,
            "train_loss": loss,
            "ratio": 99.5,
            "settings": {"rate": 0.05, "momentum": 0.9},
        }
        for change, loss in losses.items()
    ]
    text = untrained.page(rows)
    line = "| topk 0 | 99.5 | 0.05 | 0.9 | 2.500 | **0.300** | 2.310 | **1.000** | diverged | 2.400"
    assert line in text
    assert "1 of 1 do not train when run again as drawn; 1 of 1 train with *dense*, " in text
    assert "0 of 1 train with *no momentum*" in text
