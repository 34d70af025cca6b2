"""Levels by name: every parameter has the one that a search by hand finds."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.controllers import Controller, Observation, Plan
from tests.support.replay import patient

LEVELS = st.none() | st.floats(0.001, 1)


def in_force(controller: Controller, sizes: dict[str, int]) -> dict[str, float | None]:
    """Return every parameter's level after a decision."""
    decision, _ = controller.decide(Observation(-1, sizes=sizes), {})
    assert decision.level not in decision.levels.values()
    return {name: decision.levels.get(name, decision.level) for name in sizes}


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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"levels": {}}, "at least one is needed"),
    ({"levels": {"*": float("nan")}}, "a level is a finite number"),
    ({"levels": {"*": "1%"}}, "a level is a finite number"),
    ({"levels": {"*": 0.1}, "default": -1}, "a level is a finite number"),
]


@pytest.mark.parametrize(("settings", "what"), WRONG)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Plan(**settings)
