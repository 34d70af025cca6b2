"""Schedule follows its list of levels, and Deep Gradient Compression's warm-up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.controllers import Fixed, Observation, Schedule
from tests.support.replay import levels, patient, replay


def run(epochs: int | None, turns: int | None = None) -> list[Observation]:
    return [Observation(e - 1, max_epochs=epochs) for e in range(turns or epochs or 0)]


def test_one_level_an_epoch_and_the_last_one_stays() -> None:
    assert levels(Schedule((0.5, None, 0.1)), run(5)) == [0.5, None, 0.1, 0.1, 0.1]
    assert levels(Schedule((0.5, None, 0.1)), run(2)) == [0.5, None]
    assert levels(Schedule((0.5,)), run(None, 3)) == [0.5] * 3


def test_equal_parts_of_the_run() -> None:
    assert levels(Schedule((3, 2, 1), by="progress"), run(6)) == [3, 3, 2, 2, 1, 1]
    assert levels(Schedule((3, 2, 1), by="progress"), run(2)) == [3, 2]


@patient
@given(st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=9), st.integers(1, 60))
def test_progress_as_counted_by_hand(values: list[float | None], epochs: int) -> None:
    """Epoch e of E lies in part n of N where n/N ≤ e/E < (n + 1)/N."""
    wanted = []
    for epoch in range(epochs):
        done = epoch * len(values)
        (part,) = [n for n in range(len(values)) if n * epochs <= done < (n + 1) * epochs]
        wanted.append(values[part])
    assert levels(Schedule(tuple(values), by="progress"), run(epochs)) == wanted


def test_it_says_where_it_is() -> None:
    reasons = [d.reason for d in replay(Schedule((0.5, 0.1)), run(3))]
    assert reasons == [f"Level {n} of 2 on the schedule." for n in (1, 2, 2)]


def test_the_published_warm_up() -> None:
    published = (0.25, 0.063, 0.015, 0.004, 0.001)
    assert Schedule.dgc_warmup().levels == published
    assert Schedule.dgc_warmup(0.001, 5).levels == published
    sparsity = [1 - level for level in published]  # as the paper prints it
    assert sparsity == pytest.approx([0.75, 0.9375, 0.984375, 0.996, 0.999], abs=8e-4)


@patient
@given(st.floats(1e-6, 1), st.integers(1, 20))
def test_other_warm_ups_fall_exponentially(final: float, epochs: int) -> None:
    densities = Schedule.dgc_warmup(final, epochs).levels
    assert len(densities) == epochs
    for i, density in enumerate(densities):
        assert density == pytest.approx(math.exp(math.log(final) * (i + 1) / epochs), rel=6e-2)
    assert densities[-1] == final


def test_a_list_will_do() -> None:
    assert hash(Schedule([0.5, 0.1])) == hash(Schedule((0.5, 0.1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0.01, 8, None])
def test_fixed(level: float | None) -> None:
    assert levels(Fixed(level), run(4)) == [level] * 4
    assert replay(Fixed(level), run(1))[0].reason == "The level is fixed."


def test_no_end() -> None:
    with pytest.raises(ValueError, match=r"by='progress'.*Trainer\(max_epochs=\.\.\.\)"):
        replay(Schedule((1.0,), by="progress"), run(None, 1))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Schedule(()), ["levels=()", "at least one"]),
        (lambda: Schedule((0.1, -1)), ["Schedule", "-1", "at least 0"]),
        (lambda: Schedule((0.1, math.nan)), ["Schedule", "nan", "finite"]),
        (lambda: Schedule((0.1,), by="step"), ["by='step'", "'epoch' or 'progress'"]),  # type: ignore[arg-type]
        (lambda: Schedule.dgc_warmup(0.0), ["final=0.0", "(0, 1]"]),
        (lambda: Schedule.dgc_warmup(math.nan), ["final=nan", "(0, 1]"]),
        (lambda: Schedule.dgc_warmup(epochs=0), ["epochs=0", "at least one epoch"]),
        (lambda: Fixed(-0.5), ["Fixed", "-0.5", "at least 0"]),
        (lambda: Fixed(math.inf), ["Fixed", "inf", "finite"]),
        (lambda: Fixed("0.1"), ["Fixed", "'0.1'", "None for uncompressed"]),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_named(build, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        build()
    assert all(word in str(caught.value) for word in words)
