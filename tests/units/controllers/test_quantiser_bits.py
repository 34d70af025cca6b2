"""DQSGD's bits are the optimum of its stated problem, and AdaQS doubles levels as it says."""

import itertools

import numpy as np
import pytest

from lightning_gc import QSGD, TopK
from lightning_gc.controllers import DQSGD, AdaQS, Controller, Observation
from tests.support.replay import through_json


def levels(controller: Controller, seen: list[Observation]) -> list[float | None]:
    state, found = controller.init(), []
    for observation in seen:
        decision, state = controller.decide(observation, state)
        state = through_json(state)
        found.append(decision.level)
    return found


def test_dqsgd_formula() -> None:
    norms = np.array([3.0, 2.0, 0.7, 0.9, 0.05])
    seen = [Observation(-1), *(Observation(t, gradient_scale=g) for t, g in enumerate(norms))]
    exact = np.log2(1 + 7 * 0.8 ** (-np.arange(1, 6) / 2) * norms / norms[0]) + 1
    expected = [4, *np.clip(np.ceil(exact), 2, 8)]
    assert levels(DQSGD(bits=4, alpha=0.8), seen) == expected


def test_dqsgd_solves_its_problem() -> None:
    """Of all bits with as small an error, none are fewer: a search, with bits in quarters."""
    norms, alpha = np.array([4.0, 2.0, 1.0]), 0.6
    weights = alpha ** (2.0 - np.arange(3)) * norms**2

    def error(bits: np.ndarray) -> float:
        return float((weights / (2.0**bits - 1) ** 2).sum())

    first = 8.0
    controller = DQSGD(bits=9, alpha=alpha, high=16)
    ours = np.array([controller._bits(t, g / norms[0]) - 1 for t, g in enumerate(norms)])
    assert ours[0] == first
    shares = weights / (2.0**ours - 1) ** 2
    assert shares == pytest.approx([shares[0]] * 3)
    steps = np.arange(-8, 9) / 4
    others = [ours + np.array(moved) for moved in itertools.product(steps, repeat=3)]
    assert min(o.sum() for o in others if error(o) <= error(ours) * (1 + 1e-9)) >= ours.sum() - 0.01


def test_adaqs_rule() -> None:
    ratios = [1.0, 0.6, 0.5, 0.3, 0.1, 0.2, 0.01, 1e-6]
    seen = [Observation(-1)]
    seen += [Observation(t, gradient_squared=9 * r * r, gradient_noise=9.0)
             for t, r in enumerate(ratios)]  # fmt: skip
    assert levels(AdaQS(bits=3), seen) == [3, 3, 3, 4, 4, 6, 6, 8, 8]


def test_what_cannot_be_measured_keeps_the_bits() -> None:
    nothing = [Observation(t, gradient_squared=-1.0, gradient_noise=1.0) for t in range(3)]
    assert levels(AdaQS(), nothing) == [3, 3, 3]
    assert levels(DQSGD(), [Observation(0), Observation(1, gradient_scale=np.inf)]) == [4, 4]


@pytest.mark.parametrize("make", [DQSGD, AdaQS])
def test_refusals(make: type[DQSGD | AdaQS]) -> None:
    make().check(QSGD(4).knob)
    with pytest.raises(ValueError, match="level density; use QSGD"):
        make().check(TopK(0.1).knob)
    with pytest.raises(ValueError, match="has no level"):
        make().check(None)
    with pytest.raises(ValueError, match=r"whole numbers in 2\.\.16"):
        make(bits=9)
    with pytest.raises(ValueError, match="alpha=0" if make is DQSGD else "factor=1"):
        make(**{"alpha": 0} if make is DQSGD else {"factor": 1})
