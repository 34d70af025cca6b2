"""The page of the comparison at equal tuning budgets: fronts, ranks and sentences of its rows."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import equal_budgets_page as page
import equal_budgets_points as points
from equal_budgets_models import MODELS
from equal_budgets_points import BEST, TARGETS, Point


def a_point(method: str, losses: tuple[float, ...], sent: float) -> Point:
    by_seed = dict(enumerate(losses, start=1))
    return Point("lstm", method, "sparsifier", by_seed, 1000 / sent, sent, {"rate": 1.0})


def test_nothing_on_the_front_is_beaten_in_both() -> None:
    some = [
        a_point("dense", (1.0,), 1000),
        a_point("best", (0.9,), 500),
        a_point("same bytes", (1.1,), 500),
        a_point("beaten", (1.2,), 100),
        a_point("few", (1.05,), 90),
        a_point("lost", (math.inf,), 1),
    ]
    assert [p.method for p in points.front(some)] == ["best", "few"]
    assert [p.method for p in points.front(reversed(some))] == ["best", "few"]


def test_ranks_have_the_interval_that_seeds_leave() -> None:
    some = [
        a_point("first", (1.0, 1.0, 1.0), 9),
        a_point("noisy", (1.5, 3.0, 1.6), 9),
        a_point("steady", (2.0, 2.0, 2.0), 9),
        a_point("lost", (2.0, math.inf, 2.0), 9),
    ]
    found = points.mean_ranks([some, some])
    assert {name: rank for name, (rank, _, _) in found.items()} == {
        "first": 1.0,
        "steady": 2.0,
        "noisy": 3.0,
        "lost": 4.0,
    }
    assert found["first"] == (1.0, 1.0, 1.0)
    _, low, high = found["noisy"]
    assert low == 2.0
    assert high == 3.0
    assert found == points.mean_ranks([some, some])  # no chance in it
    assert list(points.mean_ranks([some, some[:2]])) == ["first", "noisy"]
    alone = points.mean_ranks([[a_point("a", (1.0,), 9), a_point("b", (1.0,), 9)]])
    assert [rank for rank, _, _ in alone.values()] == [1.5, 1.5]
    assert math.isnan(alone["a"][1])
    assert points.mean_ranks([some, []]) == {}


def rows_of(losses: dict[str, dict[int, list[float] | int]]) -> list[dict[str, Any]]:
    """Return the rows of winners: method -> ratio -> losses, or the ratio whose winner it is."""
    found = []
    for method, by_target in losses.items():
        for target in TARGETS:
            given = by_target.get(target, [])
            for seed in (1, 2, 3):
                row = {"model": "lstm", "method": method, "draw": BEST, "target": target}
                row |= {"seed": seed, "loss": None, "as": None, "pick": None}
                if isinstance(given, int):
                    row |= {"as": given, "pick": 1}
                elif given:
                    ratio = 1.2 * target or 1.0
                    row |= {"loss": given[seed - 1], "pick": 0, "ratio": ratio, "bytes": 9 / ratio}
                    row |= {"kind": "sparsifier", "settings": {"rate": 2.0}}
                found.append(row)
    return found


@pytest.fixture
def few(monkeypatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(page, "METHODS", dict.fromkeys(["identity", "topk", "qsgd", "randomk"]))
    monkeypatch.setattr(page, "MODELS", {"lstm": MODELS["lstm"]})
    return rows_of(
        {
            "identity": {0: [2.0, 2.1, 1.9]},
            "topk": {0: [1.0, 1.1, 0.9], 8: [1.5, 1.6, 1.4], 30: [3.0, 3.1, 2.9], 100: [4, 4, 4]},
            "qsgd": {0: [1.6, 1.5, 1.4]},
            "randomk": {0: [2.5, 2.5, 2.5], 8: [1.5, 1.7, 1.4], 30: 8, 100: [5.0, 5.1, 4.9]},
        }
    )


def test_sentences_follow_from_the_rows(few: list[dict[str, Any]]) -> None:
    eight = page.sentence(few, "lstm", 8)
    assert "`topk` has the lowest loss, 1.500 ± 0.100 at 10x; dense has 2.000 ± 0.100" in eight
    assert "which is more" in eight
    assert "Of 1 other methods that reach the ratio, it is not told apart from `randomk`" in eight
    hundred = page.sentence(few, "lstm", 100)
    assert "`topk` has the lowest loss" in hundred
    assert "which is less" in hundred
    assert "told apart from all" in hundred
    assert page.sentence(few, "lstm", 300) == "**300x, lstm:** no method reaches it."


def test_a_winner_of_a_lower_ratio_counts_for_what_it_sends(few: list[dict[str, Any]]) -> None:
    """What was chosen for 30x is the winner of 8x, whose runs sent too much."""
    assert points.point(few, "lstm", "randomk", 30) == points.point(few, "lstm", "randomk", 8)
    assert [p.method for p in points.entries(few, "lstm", 30)] == ["topk"]
    assert "No other method reaches the ratio." in page.sentence(few, "lstm", 30)
    names = [p.method for p in points.points(few, "lstm")]
    assert sorted(names) == ["identity", "qsgd"] + ["randomk"] * 3 + ["topk"] * 4


def test_nothing_is_said_while_rows_are_missing(few: list[dict[str, Any]]) -> None:
    fewer = [row for row in few if (row["method"], row["target"], row["seed"]) != ("qsgd", 8, 2)]
    assert page.sentence(fewer, "lstm", 8) == "**8x, lstm:** not run (1 of 4 methods are missing)."
    assert "not run (1 of 4" in page.sentence(fewer, "lstm", 30)  # it may be the winner of 8x
    assert "not run (4 of 4" in page.sentence([], "lstm", 8)
    assert "| topk | 1.0 (1.0 to 1.0) | – |" in page.page(fewer)


def test_there_is_a_page_of_whatever_has_been_run(few: list[dict[str, Any]]) -> None:
    by_seed = sorted(few, key=lambda row: row["seed"])
    for rows in (few, by_seed, [row for row in few if row["target"] == 8]):
        for until in range(0, len(rows) + 1, 3):
            assert "## What wins" in page.page(rows[:until])


def test_seeds_that_only_one_has_are_not_compared() -> None:
    one, other = a_point("one", (1.0, 1.1, 1.2), 9), a_point("other", (2.0, 2.1), 9)
    assert points.compare(one, other) == "agrees"
    assert points.compare(other, one) == "disagrees"


def test_seeds_of_a_winner_have_one_draw(few: list[dict[str, Any]]) -> None:
    for row in few:
        if (row["method"], row["target"], row["seed"]) == ("topk", 8, 2):
            row["pick"] = 5
    with pytest.raises(ValueError, match="topk on lstm at 8x: seeds have unlike draws"):
        points.point(few, "lstm", "topk", 8)


def test_the_page_has_fronts_ranks_and_losses(few, tmp_path: Path) -> None:
    text = page.page(few)
    front = text.partition("The Pareto front")[2].partition("All methods'")[0]
    assert [line.split("`")[1] for line in front.splitlines() if line.startswith("| `")] == [
        "topk"
    ] * 4
    assert "| topk | 1.0 (1.0 to 1.0) | 1." in text
    assert "| randomk | 2.500 ± 0.000 | 1.533 ± 0.153 | – | 5.000 ± 0.100 | – |" in text
    page.write_html(few, tmp_path / "equal_budgets_20260101")
    (file,) = tmp_path.glob("*.html")
    assert file.read_text().count("<tr data-front=1>") == 4
    assert file.read_text().count("<tr>") == 1 + 5


def test_draws_that_did_not_train_are_counted_with_their_ratios() -> None:
    row = {"model": "lstm", "method": "topk", "seed": 0, "loss": 1.0, "train_loss": 7.6}
    rows: list[dict[str, Any]] = [row | {"draw": 0, "ratio": 9.0}]
    assert page.untrained_table(rows) == ""
    rows.append(row | {"draw": 1, "ratio": 1300.0, "train_loss": 7.7})
    rows.append({name: row[name] for name in ("model", "method", "seed")} | {"draw": 2})
    rows[-1] |= {"loss": None, "ratio": None, "error": "ValueError: rank 9 of 8"}
    assert [points.trained(row) for row in rows] == [True, False, False]
    rows.append(row | {"draw": BEST, "ratio": 9.0, "train_loss": 7.7})  # is no draw
    assert "| topk | 2 of 3: 1,300.0x | – | – |" in page.untrained_table(rows)
