"""Saved state: its checksum tells all values apart, its structure names what is wrong with it."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc.core.saved_state import (
    ANYTHING,
    COUNT,
    ERRORS,
    FINITE,
    FLAG,
    LEVEL,
    NUMBER,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Pair,
    Plain,
    Record,
    Structure,
    check_checksum,
    checksum,
    with_checksum,
)
from lightning_gc.exchange.peers import all_or_raise, explaining

ALL_DIFFERENT: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, math.inf, math.nan, "", "1", "None", "True"),
    *([], [[]], [None], [1, 2], [[1], 2], [2, 1], {}, {"a": {}}, {"a": 1}, {"b": 1}),
    *({"a": 1, "b": 2}, {"a": [1, "b", 2]}, {"a": {"b": 1}}),
    *(torch.zeros(()), torch.zeros(0), torch.zeros(1), torch.zeros(2, 3), torch.zeros(3, 2)),
    *(torch.zeros(6), torch.zeros(6, dtype=torch.int32), torch.tensor([-0.0])),
    *(torch.zeros(12, dtype=torch.bfloat16), torch.zeros(12, dtype=torch.float16)),
    [torch.zeros(2), torch.zeros(4)],
    [torch.zeros(4), torch.zeros(2)],
]


def test_different_states_have_different_checksums() -> None:
    for one, other in itertools.combinations(ALL_DIFFERENT, 2):
        assert checksum(one) != checksum(other), (one, other)


def test_every_bit_counts() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    before = checksum(tensor)
    for bit in range(8 * 24):
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(changed) != before


def test_what_a_file_may_change_does_not_count() -> None:
    """Order of names, lists for tuples, plain numbers for NumPy's, strides."""
    one = {"a": (1, 2.0), "b": torch.ones(2, 3).t(), "n": np.float64(0.5)}
    other = {"n": 0.5, "b": torch.ones(3, 2), "a": [1, 2.0]}
    assert checksum(one) == checksum(other)


def test_a_checksum_within_the_state() -> None:
    state = with_checksum({"a": torch.ones(2)})
    check_checksum(state)
    for damaged in ({"sha256": state["sha256"]}, {"a": torch.ones(2)}, state | {"b": 1}, {}):
        with pytest.raises(ValueError, match="checksum"):
            check_checksum(damaged)


@pytest.mark.parametrize("value", [{1, 2}, object(), np.zeros(2), np.int64(3), torch.float32])
def test_what_cannot_be_saved_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="State can hold tensors, numbers"):
        checksum({"a": value})


NAN = torch.tensor([0.0, math.nan])

FITS: list[tuple[Structure, Any]] = [
    (NUMBER, math.nan),
    (FINITE, 3),
    (WHOLE, 0),
    (COUNT, 1),
    (LEVEL, None),
    (LEVEL, 0.5),
    (TEXT, ""),
    (FLAG, False),
    (ANYTHING, object()),
    (ERRORS, torch.zeros(0, dtype=torch.bfloat16)),
    (Optional(TEXT), None),
    (Each(WHOLE), {"a": 1}),
    (Listed(WHOLE), (1, 2)),
    (Pair(WHOLE, TEXT), (1, "a")),
    (Record({"a": WHOLE}, {"b": TEXT}), {"a": 1}),
    (Record({"a": WHOLE}, others=ANYTHING), {"a": 1, "c": None}),
    (Plain(), {"a": [1, "x", None, torch.ones(1), {"b": True}]}),
]

DOES_NOT: list[tuple[Structure, Any, str]] = [
    (NUMBER, True, "the state is True, not a number"),
    (FINITE, math.inf, "the state is inf, not a finite number"),
    (WHOLE, 1.0, "1.0, not a whole number of at least 0"),
    (COUNT, 0, "0, not a whole number of at least 1"),
    (LEVEL, -1, "not a finite number of at least 0"),
    (LEVEL, math.nan, "not a finite number of at least 0"),
    (TEXT, 1, "not a text"),
    (FLAG, 1, "not True or False"),
    (ERRORS, NAN, "a tensor of torch.float32 with NaN or infinity, not a tensor of finite"),
    (ERRORS, torch.ones(1).int(), "a tensor of torch.int32, not a tensor of finite"),
    (Each(WHOLE), {1: 1}, "not a dict with texts as keys"),
    (Each(Each(WHOLE)), {"a": {"b": -1}}, "a/b is -1"),
    (Listed(TEXT), ["a", 1], "^1 is 1"),
    (Listed(TEXT), "ab", "not a list"),
    (Pair(WHOLE, TEXT), [1], "not a list of two"),
    (Pair(WHOLE, TEXT), [1, 2], "^1 is 2"),
    (Record({"a": WHOLE}), {}, "a is missing"),
    (Record({"a": WHOLE}), {"a": 1, "b": 1}, "b does not belong there"),
    (Record({"a": Record({"b": WHOLE})}), {"a": {}}, "a/b is missing"),
    (Record({"a": WHOLE}), [], "not a dict"),
    (Plain(), {"a": [NAN]}, "a/0 is a tensor of torch.float32 with NaN"),
    (Plain(), {"a": {1, 2}}, "a is {1, 2}, not a number, a text"),
    (TEXT, list(range(100)), r"\.\.\., not a text"),
]


@pytest.mark.parametrize(("structure", "value"), FITS)
def test_what_fits(structure: Structure, value: Any) -> None:
    structure.check(value)


@pytest.mark.parametrize(("structure", "value", "why"), DOES_NOT)
def test_what_does_not_fit_is_named(structure: Structure, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        structure.check(value)


def fails(text: str) -> Any:
    def act() -> str:
        raise KeyError(text)

    return act


def test_sentences_of_several_workers() -> None:
    """Those that are the same become one, and not every one of a hundred is told."""
    one = explaining("could not read a", fails("x"))
    acts = {0: one}

    def gather(text: str) -> list[str]:
        problem = "could not read a (KeyError: 'x')."
        texts = [text, f'[{{}}, {{"2": "{problem}"}}]', '[{"1": "fine"}, {}]']
        return texts + [f'[{{}}, {{"{i}": "could not write {i}."}}]' for i in range(3, 10)]

    with pytest.raises(ValueError, match="could not read") as caught:
        all_or_raise(acts, 10, gather, ValueError)
    assert str(caught.value) == (
        "Worker 0, 2 of 10 could not read a (KeyError: 'x'). Worker 3 of 10 could not write 3. "
        "Worker 4 of 10 could not write 4. Worker 5 of 10 could not write 5. 4 more have failed."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_results_of_all_workers() -> None:
    found = all_or_raise(
        {2: lambda: "c", 3: lambda: "d"}, 4, lambda text: ['[{"0": "a", "1": "b"}, {}]', text]
    )
    assert found == {0: "a", 1: "b", 2: "c", 3: "d"}
