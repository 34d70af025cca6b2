"""Methods that no trial could train are refused when they are made."""

import re
from typing import Any

import pytest

from lightning_gc import Identity, NoMemory
from lightning_gc.compressors import Choice, Range
from lightning_gc.controllers import Fixed, Schedule, TotalErrorBudget
from lightning_gc.tuning import Method
from tests.support.tuning import experiment

WATCHES = TotalErrorBudget(budget=0.01, initial=0.1)


@pytest.mark.parametrize("budget", [-1, 0, float("nan"), True])
@pytest.mark.parametrize("make", [lambda budget: Method("topk", budget=budget), experiment])
def test_a_budget_is_a_number_of_bytes(make: Any, budget: Any) -> None:
    with pytest.raises(ValueError, match="give the bytes that one worker may send") as caught:
        make(budget=budget)
    assert f"budget={budget!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "value", "fix"),
    [
        ({"controller": "fixed"}, "Fixed needs level", "write Fixed(level=...)"),
        ({"controller": Fixed}, "controller=Fixed", "Fixed(...)"),
        ({"memory": NoMemory(), "controller": WATCHES}, "NoMemory()", "use memory=ErrorFeedback()"),
        ({"compressor": "cast", "controller": Fixed(0.1)}, "Fixed", "a level"),
        ({"space": {"density": [0.1, 0.2]}}, "space={'density'", "give a tuple of ranges"),
        ({"space": Range("density", 0.1, 1)}, "space=Range(", "give a tuple of ranges"),
        ({"space": ("density",)}, "space=('density',)", "give a tuple of ranges"),
        ({"memory_space": {"decay": [1.0]}}, "memory_space={'decay'", "give a tuple of ranges"),
        ({"rounds_space": Choice("every", (4,))}, "rounds_space=Choice(", "give a tuple of ranges"),
        ({"budget": "1"}, "Method(budget='1')", "write 1, without quotes"),
        ({"name": "dense"}, "HardThreshold", "another name"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], value: str, fix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fix)) as caught:
        Method(**{"name": "mine", "compressor": "hard_threshold"} | changes)
    assert value in str(caught.value)


def test_those_that_fit_are_made() -> None:
    assert Method("topk", budget=1, controller=Schedule.dgc_warmup(0.01)).budget == 1
    assert Method("dense", Identity).compressor_class is Identity
    assert Method("dense", "identity").compressor_class is Identity
