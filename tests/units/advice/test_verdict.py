"""A verdict is sure where quartiles are apart, and then suggests only what is worth it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.advice.report import judge
from tests.support.replay import patient

Rows = dict[str, dict[str, Any]]
SENT = {"ddp": 32.0, "hook": 16.0, "cast": 16.0, "qsgd": 4.0, "topk": 1.0}


def rows(spread: float = 0.02, **seconds: float) -> Rows:
    return {
        name: {"seconds": s, "low": s * (1 - spread), "high": s * (1 + spread), "bytes": SENT[name]}
        for name, s in seconds.items()
    }


def verdict(found: Rows, limit: float = 0.1) -> Any:
    return judge(found, "ddp", "cast", limit)


@pytest.mark.parametrize(
    ("found", "choice", "certain", "word"),
    [
        (rows(ddp=1.0, cast=0.8, topk=0.3), "topk", True, "70% shorter"),
        (rows(ddp=1.0, cast=0.5, topk=0.47), "cast", True, "50% shorter"),  # 6 % is not worth it
        (rows(ddp=1.0, cast=1.02, topk=0.7), "topk", True, "30% shorter"),
        (rows(ddp=1.0, cast=0.97, topk=1.1), None, True, "best method, cast"),
        (rows(ddp=1.0, cast=1.2, topk=1.1), None, True, "10% longer"),
        (rows(0.2, ddp=1.0, cast=1.0, topk=0.8), None, False, "too noisy to tell"),
        (rows(0.2, ddp=1.0, cast=1.0, topk=0.98), None, False, "idle machine"),
        # Between 16 bits and a method that quartiles do not tell apart, 16 bits.
        (rows(0.1, ddp=1.0, cast=0.5, topk=0.44), "cast", True, "50% shorter"),
        # Of two that are as fast to within 5 %, the one that sends more.
        (rows(ddp=1.0, cast=0.8, topk=0.3, qsgd=0.31), "qsgd", True, "topk is as fast"),
        (rows(ddp=1.0, cast=0.8, topk=0.3, qsgd=0.32), "topk", True, "70% shorter"),
        # ... but not one that is no tenth faster than 16 bits.
        (rows(ddp=1.0, cast=0.5, topk=0.44, qsgd=0.455), "topk", True, "56% shorter"),
    ],
)
def test_rules(found: Rows, choice: str | None, certain: bool, word: str) -> None:
    said = verdict(found)
    assert (said.choice, said.certain) == (choice, certain)
    assert word in said.reason
    assert said.reason.endswith(".")


@pytest.mark.parametrize(("hook", "word"), [(0.5, "40% shorter"), (0.2, "50% longer")])
def test_it_says_what_torchs_16_bits_take_and_suggests_ours(hook: float, word: str) -> None:
    found = rows(ddp=1.0, hook=hook, cast=0.55, topk=0.3)
    said = judge(found, "ddp", "cast", 0.1, hook="hook")
    assert said.choice == "topk"
    assert f"with plain DDP, 70% shorter. It is {hook:.4f} s with hook, {word}." in said.reason


@pytest.mark.parametrize("cast", [0.98, 0.8])
def test_the_fastest_one_that_is_noisy_hides_no_other(cast: float) -> None:
    """By its median topk is faster, but its quartiles overlap plain DDP's, or those of 16 bits."""
    found = rows(ddp=1.0, cast=cast, qsgd=0.6) | rows(1.0, topk=0.5)
    said = verdict(found)
    assert (said.choice, said.certain) == ("qsgd", True)
    assert "topk" not in said.reason


def test_where_nothing_could_be_gained_it_says_so() -> None:
    said = verdict(rows(ddp=1.0, cast=1.0, topk=1.0), limit=0.97)
    assert str(said).startswith("Do nothing: without any exchange a step takes 0.9700 s")
    assert "more than 3%" in said.reason


@patient
@given(st.tuples(*[st.floats(0.01, 10)] * 3), st.floats(0, 0.5))
def test_what_is_suggested_is_faster_beyond_its_quartiles(
    seconds: tuple[float, ...], spread: float
) -> None:
    found = rows(spread, **dict(zip(("ddp", "cast", "topk"), seconds, strict=True)))
    said = verdict(found)
    if said.choice is not None:
        assert found[said.choice]["high"] < found["ddp"]["low"]
        assert found[said.choice]["seconds"] <= 0.95 * found["ddp"]["seconds"]
    # A method in the place of 16 bits is faster by a tenth.
    if said.choice == "topk" and found["cast"]["seconds"] <= 0.95 * found["ddp"]["seconds"]:
        assert found["topk"]["seconds"] <= 0.9 * found["cast"]["seconds"]
