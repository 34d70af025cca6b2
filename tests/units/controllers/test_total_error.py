"""TotalError's formulas match calculations by hand."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from lightning_gc import HardThreshold, TopK
from lightning_gc.controllers import Observation, TotalError
from tests.support.replay import levels, replay

RESNET18, GOOGLENET, SENET18 = 11_173_962, 6_166_250, 11_260_354


@pytest.mark.parametrize(
    ("elements", "printed", "exact"),
    [
        (RESNET18, 4.73e-3, 0.004730057383),
        (GOOGLENET, 6.37e-3, 0.006367360517),
        (SENET18, 4.71e-3, 0.004711877405),
    ],
)
def test_the_papers_rule(elements: int, printed: float, exact: float) -> None:
    """1/(2√(0.001 d)), worked out with 30 decimals; printed are the authors' own."""
    seen = [Observation(e, num_elements=elements, max_epochs=9) for e in (-1, 0, 1)]
    got = levels(TotalError(k_min=0.001), seen)
    assert got == [pytest.approx(exact, rel=1e-9)] * 3
    assert got[0] == pytest.approx(printed, rel=2e-3)
    assert f"{elements:,}" in replay(TotalError(k_min=0.001), seen)[0].reason


def measured(rows: Iterable[tuple[float, float, float]], d: int = 10_000) -> list[Observation]:
    """Epochs of (‖∇f_i‖², noise, dissimilarity)."""
    first = Observation(-1, num_elements=d)
    rest = [
        replace(
            first,
            epoch=epoch,
            gradient_squared=squared,
            gradient_noise=noise,
            gradient_dissimilarity=dissimilarity,
        )
        for epoch, (squared, noise, dissimilarity) in enumerate(rows)
    ]
    return [first, *rest]


def formula(k: float, d: float, m: float, zeta2: float, sigma2: float) -> float:
    return (2 / k**0.5) * ((2 * d / k + m) * zeta2 + sigma2) ** 0.5


def test_the_longer_formula_by_hand() -> None:
    """k = 100, 2d/k = 200; noise = 25 a + 100 on the line; (2/10)·√(225·4 + 100) = 0.2·√1000."""
    assert formula(100, 10_000, 25, 4, 100) == pytest.approx(6.324555, abs=1e-6)
    controller = TotalError(k_min=0.01, estimate_epochs=3)
    rows = [(2.0, 150.0, 3.0), (4.0, 200.0, 4.0), (6.0, 250.0, 5.0), (9.0, 9.0, 9.0)]
    decisions = replay(controller, measured(rows))
    assert [d.level for d in decisions] == [
        *[pytest.approx(1 / (2 * 10), rel=1e-12)] * 3,
        *[pytest.approx(6.324555, rel=1e-6)] * 2,  # the fourth epoch changes nothing
    ]
    assert decisions[3].reason == "Estimated: M = 25, ζ² = 4, σ² = 100."
    assert decisions[4].reason == "The threshold is kept."


def test_the_longer_formula_for_resnet18() -> None:
    """Worked out with 30 decimals for M = 1.5, ζ² = 4e-4, σ² = 0.03."""
    rows = [(0.02, 0.06, 4e-4), (0.04, 0.09, 4e-4)]
    got = levels(TotalError(k_min=0.001, estimate_epochs=2), measured(rows, RESNET18))
    assert got[2] == pytest.approx(0.0172433786, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "m", "sigma2"),
    [
        ([(5.0, 70.0, 2.0)], 0.0, 70.0),  # one epoch: nothing to tell apart
        ([(5.0, 60.0, 2.0), (5.0, 80.0, 2.0)], 0.0, 70.0),  # no difference
        ([(4.0, 80.0, 2.0), (6.0, 60.0, 2.0)], 0.0, 70.0),  # falls: no M below 0
        ([(4.0, 20.0, 2.0), (6.0, 120.0, 2.0)], 14.0, 0.0),  # too steep: no σ² below 0
        ([(4.0, 60.0, 1.0), (6.0, 80.0, 3.0)], 10.0, 20.0),
        ([(0.0, 0.0, 2.0), (0.0, 0.0, 2.0)], 0.0, 0.0),
    ],
)
def test_noise_told_apart(rows, m: float, sigma2: float) -> None:
    got = levels(TotalError(k_min=0.01, estimate_epochs=len(rows)), measured(rows))
    assert got[-1] == pytest.approx(formula(100, 10_000, m, 2.0, sigma2), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_the_longer_formula_goes_with_the_gradients_scale(scale: float) -> None:
    rows = [(2.0, 150.0, 3.0), (4.0, 180.0, 4.0)]
    scaled = [tuple(scale**2 * x for x in row) for row in rows]
    controller = TotalError(k_min=0.01, estimate_epochs=2)
    plain, other = (levels(controller, measured(r))[-1] for r in (rows, scaled))  # type: ignore[arg-type]
    assert plain is not None
    assert other == pytest.approx(scale * plain)


def test_the_total_error_is_logged_and_asked_for() -> None:
    for controller in (TotalError(k_min=0.1), TotalError(budget=0.1)):
        seen = [Observation(-1, num_elements=9, progress=0.0, total_error=2.5)]
        assert replay(controller, seen)[0].figures["total_error"] == 2.5
        assert controller.errors
    assert not TotalError(k_min=0.1).moments
    assert TotalError(k_min=0.1, estimate_epochs=1).moments


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["k_min=None", "budget=None", "either"]),
        ({"k_min": 0.1, "budget": 0.1}, ["k_min=0.1", "budget=0.1", "either"]),
        ({"k_min": 0.0}, ["k_min=0.0", "(0, 1]"]),
        ({"k_min": math.nan}, ["k_min=nan", "(0, 1]"]),
        ({"budget": 1.5}, ["budget=1.5", "(0, 1]"]),
        ({"k_min": 0.1, "estimate_epochs": -1}, ["estimate_epochs=-1", "0 or more"]),
        ({"budget": 0.1, "estimate_epochs": 2}, ["estimate_epochs=2", "with k_min only"]),
        ({"k_min": 0.1, "initial": 1.0}, ["initial=1.0", "with budget only"]),
        ({"budget": 0.1, "initial": 0.0}, ["initial=0.0", "above 0"]),
        ({"budget": 0.1, "initial": math.inf}, ["initial=inf", "above 0"]),
    ],
)
def test_bad_settings_are_named(settings, words: list[str]) -> None:
    with pytest.raises(ValueError, match="TotalError") as caught:
        TotalError(**settings)
    assert all(word in str(caught.value) for word in words)


def test_a_run_without_an_end() -> None:
    with pytest.raises(ValueError, match=r"budget=0\.1.*Trainer\(max_epochs=\.\.\.\)"):
        replay(TotalError(budget=0.1), [Observation(-1, num_elements=9)])


def test_only_a_threshold_can_be_driven() -> None:
    TotalError(k_min=0.1).check(HardThreshold().knob)
    for knob, what in ((TopK().knob, "a density"), (None, "no level")):
        with pytest.raises(ValueError, match=f"this compressor has {what}; use HardThreshold"):
            TotalError(k_min=0.1).check(knob)
