"""The thesis's protocol: what is drawn, what is compared, and what is said of it."""

import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import thesis
import thesis_cells


def rows(costs, cells):
    """Return rows as if a method's perplexity were this many times dense's, a bit by seed."""
    made = []
    for cell in cells:
        cost = costs.get(cell["method"], 1.0) * (1 + 0.001 * cell["seed"] + 0.01 * cell["draw"])
        figures = {"validation": 100 * cost, "test": 110 * cost, **thesis.drawn(cell)}
        figures |= {"rate": 20.0, "dropout": 0.3, "momentum": None, "best_epoch": 9}
        figures |= {"encoding_ratio": 80.0, "cpu_seconds": 1.0, "train_course": [6.0, 5.0 * cost]}
        made.append({**cell, **figures})
    return made


def test_all_methods_have_the_same_draws_and_every_repetition_its_own() -> None:
    cells = thesis.cells(2)
    drawn = {(cell["seed"], cell["draw"]): thesis.drawn(cell) for cell in cells}
    assert all(thesis.drawn(cell) == drawn[cell["seed"], cell["draw"]] for cell in cells)
    rates = {settings["model.learning_rate"] for settings in drawn.values()}
    assert len(rates) == 2 * 20
    assert 1 <= min(rates) < 10 < 40 < max(rates) <= 50


def test_the_figures_name_the_methods_of_the_configuration() -> None:
    named = {method for family in thesis.FAMILIES.values() for method in family}
    assert named | {"dense", "randomk_50x_no_feedback"} == set(thesis.METHODS)


def test_a_draw_that_a_method_lacks_is_left_out_for_all() -> None:
    some = rows({}, [cell for cell in thesis.cells(1) if cell["draw"] < 2])
    lost = {"method": "dgc_50x", "draw": 1, "hidden": 48, "workers": 1}
    kept = thesis.complete([row for row in some if not lost.items() <= row.items()])
    assert {row["draw"] for row in kept if (row["hidden"], row["workers"]) == (48, 1)} == {0}
    assert {row["draw"] for row in kept if row["hidden"] == 24} == {0, 1}


@pytest.mark.parametrize(("share", "said"), [(0.9, "agrees"), (1.1, "disagrees")])
def test_verdicts_follow_the_winners(share, said) -> None:
    cells = [cell for cell in thesis.cells(3) if cell["draw"] < 2]
    some = rows({"topk_50x": share, "topk_5000x": 1.5}, cells)
    found = {claim.text: claim.verdict for claim in thesis.claims(some)}
    assert found["5.2: Top-k at 50x is better than dense"] == said
    assert found["5.2: Top-k at 5000x is worse than dense"] == "agrees"
    assert found["5.2: no trend over workers, topk_50x"] == "agrees: none found"
    assert "| topk_5000x | +50.0 ± 0.0 |" in thesis.page(some)
    figure = Figure()
    thesis.draw(some, figure)
    assert len(figure.axes) == 6


def test_one_repetition_tells_nothing() -> None:
    some = rows({"topk_50x": 0.5}, [cell for cell in thesis.cells(1) if cell["draw"] < 2])
    assert {claim.verdict for claim in thesis.claims(some)} == {"cannot be told"}


def test_nothing_is_said_before_all_methods_have_run() -> None:
    some = rows({}, [cell for cell in thesis.cells(1) if cell["method"] != "topk_50x"])
    assert thesis.claims(some) == []
    thesis.draw(some, figure := Figure())
    assert figure.axes == []


def test_reports_of_several_cells_make_one_table(monkeypatch, tmp_path, capsys) -> None:
    for name, topk in (("h100_w1", "90.0"), ("h300_w2", "diverged")):
        (folder := tmp_path / name / "tables").mkdir(parents=True)
        results = f"method,test\ndense,100.0\ntopk_50x,{topk}\n"
        (folder / "results.csv").write_text(results)
        (folder / "cpu_seconds.csv").write_text("method,trial,cpu_seconds\ndense,0,2\ndense,1,4\n")
    folders = [str(tmp_path / name) for name in ("h100_w1", "h300_w2")]
    monkeypatch.setattr(sys, "argv", ["thesis_cells.py", *folders])
    thesis_cells.main()
    text = capsys.readouterr().out
    assert "| | h100_w1 | h300_w2 |" in text
    assert "| topk_50x | -10.0 % | diverged |" in text
    assert "| dense | 3.00 | 3.00 |" in text
    monkeypatch.setattr(sys, "argv", ["thesis_cells.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="give folders of reports"):
        thesis_cells.main()
