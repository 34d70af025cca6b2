"""A field's limits and choices are declared once: they check it, and describe it."""

import inspect
from typing import Any

import pytest
import torch

from lightning_gc import AdaComp, ErrorFeedback, Int8, TernGrad, TopK
from lightning_gc.controllers import Schedule


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan"), None, True])
def test_beyond_the_interval(value: Any) -> None:
    with pytest.raises(ValueError, match=r"decay=.*weight of the old error must be in \(0, 1\]"):
        ErrorFeedback(decay=value)


def test_the_ends_of_an_interval_and_none() -> None:
    assert ErrorFeedback(decay=1.0).decay == 1.0
    assert Int8(1 << 16).block_size == 1 << 16
    assert TernGrad(clip=None).clip is None
    with pytest.raises(ValueError, match=r"AdaComp\(bin_size=None\)"):
        AdaComp(bin_size=None)  # type: ignore[arg-type]


def test_a_dtype_by_its_name_and_a_list_for_a_tuple() -> None:
    assert TopK(0.1, value_dtype=torch.bfloat16) == TopK(0.1, value_dtype="bfloat16")  # type: ignore[arg-type]
    assert Schedule([0.1, 0.01]) == Schedule((0.1, 0.01))  # type: ignore[arg-type]


def test_help_says_what_is_refused() -> None:
    said = inspect.getdoc(TopK) or ""
    assert "ValueError: ``density`` is not in (0, 1]" in said
    assert "``selection`` is not 'exact' or 'sampled'" in said
