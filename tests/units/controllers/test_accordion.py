"""Accordion decides as the authors' programs do."""

import math

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lightning_gc import QSGD, HardThreshold, TopK
from lightning_gc.controllers import (
    Accordion,
    Needs,
)
from tests.support.accordion import (
    FLAT,
    HIGH,
    LOW,
    Trace,
    accordion,
    authors,
    comparison,
    first_batches,
    little,
    observations,
)
from tests.support.replay import patient, replay


@st.composite
def traces(draw: st.DrawFn, zeros: bool = True) -> tuple[Trace, list[float], int]:
    """Norms that stay, drift, jump, vanish; rates of a warm-up, plateaus and decays."""
    epochs = draw(st.integers(1, 25))
    simple = [1.0, 0.5, 1.5, 0.75, 2.0, 0.25, *([0.0] if zeros else [])]  # ratios of just 0.5
    norm = st.sampled_from(simple) | st.floats(1e-6, 1e6)
    column = st.lists(norm, min_size=epochs, max_size=epochs)
    names = draw(st.sets(st.sampled_from("abc"), min_size=1))
    norms = {name: draw(column) for name in sorted(names)}
    warm, decay = draw(st.integers(0, 6)), draw(st.sampled_from([0.1, 0.5, 0.99]))
    milestones = draw(st.sets(st.integers(1, 25)))
    rates, rate = [], 0.4
    for epoch in range(epochs + 1):
        rate *= decay if epoch in milestones else 1
        rates.append(rate * min(1.0, (epoch + 1) / (warm + 1)))
    return norms, rates, draw(st.integers(1, 10))


@patient
@given(traces())
def test_as_the_authors_program(trace) -> None:
    norms, rates, interval = trace
    first, *decisions = replay(accordion(interval), observations(norms, rates))
    assert first.level == LOW
    assert not first.levels
    assert [little(d, norms) for d in decisions] == authors(norms, rates, interval)
    assert all(set(d.levels) == set(norms) for d in decisions)


@patient
@given(traces(), st.sampled_from([1.5, 2.0, 10.0]))
@example(({"a": [1.0] * 4}, [0.4, 0.39, 0.38, 0.37, 0.36], 1), 2.0)
@example(({"a": [1.0] * 4}, [0.1, 0.1 * 0.1, 0.1**3, 0.1**4, 0.1**4], 1), 10.0)  # rounded up
def test_with_decays_of_a_factor(trace, decay: float) -> None:
    norms, rates, interval = trace
    _, *decisions = replay(accordion(interval, decay=decay), observations(norms, rates))
    wanted = authors(norms, rates, interval, decay=decay)
    assert [little(d, norms) for d in decisions] == wanted


@patient
@given(traces(), st.sampled_from([0.1, 0.5, 3.0]))
def test_other_thresholds(trace, threshold: float) -> None:
    norms, rates, interval = trace
    _, *decisions = replay(accordion(interval, threshold=threshold), observations(norms, rates))
    assert [little(d, norms) for d in decisions] == authors(norms, rates, interval, threshold)


@patient
@given(traces())
def test_one_norm_for_the_model(trace) -> None:
    """The norm of all sums laid side by side, and one level."""
    norms, rates, interval = trace
    whole = [math.hypot(*values) for values in zip(*norms.values(), strict=True)]
    for before, now in zip(whole, whole[interval:], strict=False):
        assume(before == 0 or abs(abs(before - now) / before - 0.5) > 1e-9)
    _, *decisions = replay(accordion(interval, granularity="model"), observations(norms, rates))
    wanted = authors({"model": whole}, rates, interval)
    assert [d.level == LOW for d in decisions] == [row["model"] for row in wanted]
    assert not any(d.levels for d in decisions)


@patient
@given(traces(zeros=False), st.sampled_from([1.0, 2.0]))
def test_as_the_total_error_papers_stand_in(trace, decay: float) -> None:
    """Decided within the epoch whose first batch it was, and not again before the next check."""
    norms, rates, interval = trace
    controller = accordion(interval, detector="minibatch", decay=decay)
    first, *decisions = replay(controller, first_batches(norms, rates, steps=9))
    assert first.level == LOW
    wanted = comparison(norms, rates, interval, decay)
    for of_epoch in (decisions[::3], decisions[1::3], decisions[2::3]):
        assert [little(d, norms) for d in of_epoch] == wanted


@patient
@given(traces(zeros=False))
def test_the_stand_in_where_an_epoch_has_one_step(trace) -> None:
    """Then the first batch is told at the epoch's end, and its levels hold from the next one on."""
    norms, rates, interval = trace
    controller = accordion(interval, detector="minibatch")
    _, *decisions = replay(controller, first_batches(norms, rates, steps=1))
    assert [little(d, norms) for d in decisions] == comparison(norms, rates, interval)


def test_a_state_of_0_1_is_continued() -> None:
    """It has no count of checks; the decisions are the same."""
    norms = {"w": [1.0, 1.0, 4.0, 4.0, 4.0, 4.0]}
    *early, late = observations(norms, FLAT[:7])
    state = accordion(2).init()
    for observation in early:
        _, state = accordion(2).decide(observation, state)
    old = {name: state[name] for name in ("norms", "critical", "rate")}
    decisions = [accordion(2).decide(late, each)[0] for each in (state, old)]
    assert decisions[0] == decisions[1]


TABLE = {
    "settles at the second check": ([8, 1, 1, 7, 1, 1, 6, 1], FLAT, 3, "LLLhhhhh"),
    "compared with the check before, not the epoch before": (
        [8, 8, 1, 1, 1, 1, 1, 1],
        FLAT,
        2,
        "LLLLhhhh",
    ),
    "half is critical, a little less is not": ([8, 4, 6, 3.01, 4.5, 9, 9, 9], FLAT, 1, "LLLhhLhh"),
    "growth is change too": ([1, 2, 4, 8, 8, 8, 8, 8], FLAT, 1, "LLLLhhhh"),
    "nothing before it: critical": ([0, 0, 5, 5, 0, 0, 0, 1], FLAT, 1, "LLLhLLLL"),
    "a decay, until the next check": (
        [5, 5, 5, 5, 5, 5, 5, 5],
        [1, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1],
        3,
        "LLLhLLhh",
    ),
    "a decay right after a check overrules it": (
        [5, 5, 5, 5, 5, 5, 5, 5],
        [1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.1],
        3,
        "LLLLLLhh",
    ),
    "a warm-up does not count": (
        [5, 5, 5, 5, 5, 5, 5, 5],
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        2,
        "LLhhhhhh",
    ),
}


@pytest.mark.parametrize(("norms", "rates", "interval", "wanted"), TABLE.values(), ids=TABLE)
def test_by_hand(norms: list[float], rates: list[float], interval: int, wanted: str) -> None:
    """L for the level of little compression, h for the other; epochs 1 to 8."""
    trace = {"w": [float(norm) for norm in norms]}
    _, *decisions = replay(accordion(interval), observations(trace, rates))
    assert "".join("L" if d.levels["w"] == LOW else "h" for d in decisions) == wanted
    assert authors(trace, rates, interval) == [{"w": letter == "L"} for letter in wanted]


def test_each_parameter_by_itself_and_in_words() -> None:
    norms = {"calm": [4.0, 4.0, 4.0], "wild": [4.0, 1.0, 4.0]}
    *_, last = replay(accordion(1), observations(norms, FLAT[:4]))
    assert last.levels == {"calm": HIGH, "wild": LOW}
    assert last.figures == {"critical_share": 0.5}
    assert "50% of the parameters are in a critical regime" in last.reason


def test_a_norm_that_is_not_finite_is_critical() -> None:
    norms = {"w": [4.0, math.nan, 4.0, 4.0, math.inf, 4.0, 4.0]}
    _, *decisions = replay(accordion(1), observations(norms, FLAT[:8]))
    assert [d.levels["w"] for d in decisions] == [LOW, LOW, LOW, HIGH, LOW, LOW, HIGH]


def test_uncompressed_is_a_level_of_little_compression() -> None:
    norms = {"w": [4.0, 4.0]}
    controller = Accordion(low=None, high=4, interval=1)
    first, after, later = replay(controller, observations(norms, FLAT[:3]))
    assert (first.level, after.levels, later.levels) == (None, {"w": None}, {"w": 4})
    controller.check(QSGD().knob)


def test_what_it_asks_for() -> None:
    assert accordion(1).needs == Needs(gradients="epoch sum")
    assert accordion(1, detector="minibatch").needs == Needs(gradients="first batch")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"interval": 0}, ["interval=0", "1 or more"]),
        ({"interval": 2.5}, ["interval=2.5", "a whole number"]),
        ({"threshold": 0.0}, ["threshold=0.0", "0.5"]),
        ({"threshold": math.nan}, ["threshold=nan", "0.5"]),
        ({"decay": 0.5}, ["decay=0.5", "1 or more"]),
        ({"decay": math.nan}, ["decay=nan", "1 or more"]),
        ({"granularity": "layer"}, ["granularity='layer'", "'parameter' or 'model'"]),
        ({"detector": "step"}, ["detector='step'", "'epoch' or 'minibatch'"]),
        ({"low": -0.1}, ["Accordion", "-0.1", "at least 0"]),
        ({"high": "0.1"}, ["Accordion", "'0.1'", "number"]),
        ({"high": True}, ["Accordion", "True", "number"]),
        ({"low": math.inf}, ["Accordion", "inf", "finite"]),
    ],
)
def test_bad_settings_are_named(settings, words: list[str]) -> None:
    with pytest.raises(ValueError, match="Accordion") as caught:
        Accordion(**{"low": LOW, "high": HIGH, **settings})
    assert all(word in str(caught.value) for word in words)


def test_levels_the_wrong_way_round() -> None:
    with pytest.raises(ValueError, match=r"low=0\.01 compresses harder than high=0\.25.*swap"):
        Accordion(low=HIGH, high=LOW).check(TopK().knob)
    with pytest.raises(ValueError, match=r"threshold means more compression.*swap"):
        accordion(1).check(HardThreshold().knob)
    with pytest.raises(ValueError, match=r"has no level; use one with a level, such as TopK"):
        accordion(1).check(None)
    accordion(1).check(TopK().knob)
    Accordion(low=HIGH, high=LOW).check(HardThreshold().knob)
