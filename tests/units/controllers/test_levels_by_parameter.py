"""Levels by size and by name: every parameter has the one that a search by hand finds."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.controllers import BySize, Controller, Observation, Plan
from tests.support.replay import patient

LEVELS = st.none() | st.floats(0.001, 1)


def in_force(controller: Controller, sizes: dict[str, int]) -> dict[str, float | None]:
    """Return every parameter's level after a decision."""
    decision, _ = controller.decide(Observation(-1, sizes=sizes), {})
    assert decision.level not in decision.levels.values()
    return {name: decision.levels.get(name, decision.level) for name in sizes}


@patient
@given(
    st.dictionaries(st.integers(1, 99), LEVELS, min_size=1), LEVELS, st.lists(st.integers(1, 120))
)
def test_the_largest_size_reached_decides(
    table: dict[int, float | None], default: float | None, numels: list[int]
) -> None:
    found = in_force(BySize(table, default), {f"p{n}": n for n in numels})
    for numel in numels:
        reached = [size for size in table if size <= numel]
        assert found[f"p{numel}"] == (table[max(reached)] if reached else default)


NAMES = ("embedding.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0", "decoder.weight")


@patient
@given(
    st.dictionaries(st.sampled_from(["embedding.*", "lstm.*", "*_l0", "*"]), LEVELS, min_size=1),
    LEVELS,
)
def test_the_first_pattern_that_fits_decides(
    table: dict[str, float | None], default: float | None
) -> None:
    found = in_force(Plan(table, default), dict.fromkeys(NAMES, 10))
    for name in NAMES:
        fitting = [level for pattern, level in table.items() if fnmatchcase(name, pattern)]
        assert found[name] == (fitting[0] if fitting else default)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'lstm.wieght\*' fits none .* lstm\.weight_ih_l0"):
        in_force(Plan({"lstm.wieght*": 0.1}), dict.fromkeys(NAMES, 10))


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (BySize, {"levels": {}}, "at least one level is needed"),
    (BySize, {"levels": {0: 0.1}}, "a number of elements is an integer of at least 1"),
    (BySize, {"levels": {"65536": 0.1}}, "'65536': 0.1}.*: a number of elements is an integer"),
    (BySize, {"levels": {10: "1%"}}, "a level is a finite number"),
    (BySize, {"levels": {10: 0.1}, "default": -1}, "a level is a finite number"),
    (Plan, {"levels": {}}, "at least one is needed"),
    (Plan, {"levels": {"*": float("nan")}}, "a level is a finite number"),
]


@pytest.mark.parametrize(("controller", "settings", "what"), WRONG)
def test_what_makes_no_sense_is_refused(
    controller: Any, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        controller(**settings)
