"""EstimatedThreshold's formula matches calculations by hand, its estimates NumPy and the truth."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.controllers import EstimatedThreshold, Observation
from tests.support.replay import levels, patient, replay

RESNET18 = 11_173_962
Rows = Sequence[tuple[float, float, float]]


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


def test_by_hand() -> None:
    """k = 100, 2d/k = 200; noise = 25 a + 100 on the line; (2/10)·√(225·4 + 100) = 0.2·√1000."""
    assert formula(100, 10_000, 25, 4, 100) == pytest.approx(6.324555, abs=1e-6)
    controller = EstimatedThreshold(k_min=0.01, epochs=3)
    rows = [(2.0, 150.0, 3.0), (4.0, 200.0, 4.0), (6.0, 250.0, 5.0), (9.0, 9.0, 9.0)]
    decisions = replay(controller, measured(rows))
    assert [d.level for d in decisions] == [
        *[pytest.approx(1 / (2 * 10), rel=1e-12)] * 3,
        *[pytest.approx(6.324555, rel=1e-6)] * 2,  # the fourth epoch changes nothing
    ]
    assert decisions[3].reason == "Estimated: M = 25, ζ² = 4, σ² = 100."
    assert decisions[4].reason == "The threshold is kept."


def test_for_resnet18() -> None:
    """Worked out with 30 decimals for M = 1.5, ζ² = 4e-4, σ² = 0.03."""
    rows = [(0.02, 0.06, 4e-4), (0.04, 0.09, 4e-4)]
    got = levels(EstimatedThreshold(k_min=0.001, epochs=2), measured(rows, RESNET18))
    assert got[2] == pytest.approx(0.0172433786, rel=1e-6)


@pytest.mark.parametrize("delta", [0.5, 0.01, 0.001])
def test_it_makes_the_papers_two_bounds_equal(delta: float) -> None:
    """Compression terms of Theorem 6, 2γ²L²·dλ², and 7, 8γ²L²/δ·((2/δ + M)ζ² + σ²); δ = k/d."""
    d, zeta2, sigma2 = 5_000, 3.0, 40.0
    seen = measured([(7.0, sigma2, zeta2)], d)
    level = levels(EstimatedThreshold(k_min=delta, epochs=1), seen)[-1]
    assert level is not None
    assert 2 * d * level**2 == pytest.approx(8 / delta * (2 / delta * zeta2 + sigma2))


@pytest.mark.parametrize(
    ("rows", "m", "sigma2"),
    [
        ([(5.0, 70.0, 2.0)], 0.0, 70.0),  # one epoch: nothing to tell apart
        ([(5.0, 60.0, 2.0), (5.0, 80.0, 2.0)], 0.0, 70.0),  # no difference
        ([(4.0, 80.0, 2.0), (6.0, 60.0, 2.0)], 0.0, 70.0),  # falls: no M below 0
        ([(4.0, 20.0, 2.0), (6.0, 120.0, 2.0)], 14.0, 0.0),  # too steep: no σ² below 0
        ([(4.0, 60.0, 1.0), (6.0, 80.0, 3.0)], 10.0, 20.0),
        ([(0.0, 0.0, 2.0), (0.0, 0.0, 2.0)], 0.0, 0.0),
        ([(-1.0, 60.0, 2.0), (0.5, 80.0, 2.0)], 0.0, 70.0),  # unbiased, hence below 0
        ([(4.0, 60.0, -3.0), (6.0, 80.0, 7.0)], 10.0, 20.0),
    ],
)
def test_noise_told_apart(rows: Rows, m: float, sigma2: float) -> None:
    got = levels(EstimatedThreshold(k_min=0.01, epochs=len(rows)), measured(rows))
    assert got[-1] == pytest.approx(formula(100, 10_000, m, 2.0, sigma2), rel=1e-12)


@pytest.mark.parametrize(
    "row",
    [
        (4.0, -60.0, -3.0),  # unbiased, of a few steps: all below 0
        (-4.0, -60.0, 0.0),
        (0.0, 0.0, 0.0),
        (4.0, math.nan, 1.0),
        (4.0, 60.0, math.nan),
        (math.inf, math.inf, 1.0),
    ],
)
def test_estimates_that_give_no_threshold_keep_it_and_warn(row: tuple[float, float, float]) -> None:
    *_, measuring, last, after = replay(
        EstimatedThreshold(k_min=0.01, epochs=1), measured([row, (4.0, 60.0, 1.0)])
    )[-3:]
    assert measuring.level == last.level == after.level == 1 / (2 * 10)
    assert "the threshold 0.05 is kept" in last.warning
    assert last.reason == "The threshold is kept."


def test_noise_below_zero_counts_as_none() -> None:
    got = levels(EstimatedThreshold(k_min=0.01, epochs=1), measured([(4.0, -60.0, 2.0)]))
    assert got[-1] == pytest.approx(formula(100, 10_000, 0.0, 2.0, 0.0), rel=1e-12)


def test_no_dissimilarity_below_zero() -> None:
    rows = [(4.0, 60.0, -3.0), (6.0, 80.0, 1.0)]
    got = levels(EstimatedThreshold(k_min=0.01, epochs=2), measured(rows))
    assert got[-1] == pytest.approx(formula(100, 10_000, 10.0, 0.0, 20.0), rel=1e-12)


@patient
@given(
    m=st.floats(0, 50),
    sigma2=st.floats(1, 100),
    squared=st.lists(st.floats(0.1, 10), min_size=3, max_size=6, unique=True),
    off=st.lists(st.floats(-0.1, 0.1), min_size=6, max_size=6),
)
def test_the_line_is_numpys(
    m: float, sigma2: float, squared: list[float], off: list[float]
) -> None:
    """Noise around the line of the paper's model, which ``numpy.polyfit`` finds again."""
    noise = [sigma2 + m * a + b for a, b in zip(squared, off, strict=False)]
    slope, intercept = np.polyfit(squared, noise, 1)
    if max(squared) - min(squared) < 0.1 or slope < 0 or intercept < 0:
        return
    rows = [(a, b, 1.0) for a, b in zip(squared, noise, strict=True)]
    got = levels(EstimatedThreshold(k_min=0.01, epochs=len(rows)), measured(rows))
    assert got[-1] == pytest.approx(formula(100, 10_000, slope, 1.0, intercept), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_it_goes_with_the_gradients_scale(scale: float) -> None:
    """λ has the gradient's units; the moments are its squares."""
    rows = [(2.0, 150.0, 3.0), (4.0, 180.0, 4.0)]
    scaled = [(a * scale**2, b * scale**2, c * scale**2) for a, b, c in rows]
    controller = EstimatedThreshold(k_min=0.01, epochs=2)
    plain, other = (levels(controller, measured(r))[-1] for r in (rows, scaled))
    assert plain is not None
    assert other == pytest.approx(scale * plain)


@pytest.mark.parametrize("k_min", [0.04, 0.01])
def test_how_often_noise_reaches_it(k_min: float) -> None:
    """As the docstring says: every (λ/s)² = 4/k_min steps, and hardly ever in a tenth of these."""
    d, s, wait = 400, 0.3, round(4 / k_min)
    level = levels(EstimatedThreshold(k_min, epochs=1), measured([(0.0, d * s**2, 0.0)], d))[-1]
    assert level is not None
    assert (level / s) ** 2 == pytest.approx(wait)
    draw, error, sent = np.random.default_rng(0), np.zeros(d), []
    for _ in range(20 * wait):
        error += s * draw.standard_normal(d)
        above = np.abs(error) >= level
        sent.append(above.mean())
        error[above] = 0
    # Steps overshoot λ by 0.58·s on average, which a walk in small steps would not.
    expected = (s / (level + 0.5826 * s)) ** 2
    assert np.mean(sent) == pytest.approx(expected, rel=0.05)
    assert np.mean(sent[: wait // 10]) < 0.1 * expected
