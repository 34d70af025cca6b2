"""ErrorFeedback(lr_aware=True) matches Algorithm 1 of the total-error paper."""

import numpy as np
import pytest
import torch

from lightning_gc import ErrorFeedback, HardThreshold, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep

WORKERS, D, STEPS = 4, 30, 60
RATES = {
    "constant": [0.1] * STEPS,
    "steps down": [0.1 * 0.3 ** (t // 20) for t in range(STEPS)],
    "warm-up and cosine": [
        0.2 * min((t + 1) / 10, 0.5 + 0.49 * np.cos(np.pi * t / STEPS)) for t in range(STEPS)
    ],
    "jumps": [0.1 if t % 3 else 0.01 for t in range(STEPS)],
}


class Quadratics:
    """f_i(x) = ½ (x − c_i)ᵀ A_i (x − c_i), one a worker, and noise that is drawn beforehand."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.curvature = rng.uniform(0.1, 2.0, (WORKERS, D))
        self.centre = rng.normal(size=(WORKERS, D))
        self.noise = 0.1 * rng.normal(size=(STEPS, WORKERS, D))

    def gradients(self, x: np.ndarray, t: int) -> np.ndarray:
        return self.curvature * (x - self.centre) + self.noise[t]


def compress(x: np.ndarray, compressor: Compressor) -> np.ndarray:
    """C, written slowly."""
    if isinstance(compressor, HardThreshold):
        return np.where(np.abs(x) >= compressor.threshold, x, 0)
    assert isinstance(compressor, TopK)
    kept = np.argsort(np.abs(x))[-round(compressor.density * D) :]
    return np.where(np.isin(np.arange(D), kept), x, 0)


def algorithm_1(rates: list[float], compressor: Compressor) -> tuple[np.ndarray, np.ndarray]:
    """Return all x_t and the last e_i: p = e + γg; Δ = γ·C(p/γ); e = p − Δ; x −= mean Δ."""
    problem, x, e, path = Quadratics(), np.zeros(D), np.zeros((WORKERS, D)), []
    for t, rate in enumerate(rates):
        p = e + rate * problem.gradients(x, t)
        if rate == 0:  # SGD does not move, so nothing is sent, and γg is nothing to keep
            path.append(x)
            continue
        sent = np.stack([rate * compress(row / rate, compressor) for row in p])
        e = p - sent
        x = x - sent.mean(0)
        path.append(x)
    return np.stack(path), e


def library(
    rates: list[float], compressor: Compressor, memory: ErrorFeedback, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same of a run with the library: SGD on the means that it hands out."""
    problem, x, path = Quadratics(), np.zeros(D), []
    run = Lockstep(WORKERS, compressor, memory)
    for t, rate in enumerate(rates):
        for engine in run.engines:
            engine.learning_rates.now = {"x": rate}
        rows = torch.from_numpy(problem.gradients(x, t)).to(dtype)
        result = run.step([{"x": row} for row in rows])
        x = x - rate * result.mean["x"].double().numpy()
        path.append(x)
    assert {error["x"].dtype for error in result.errors} == {dtype}
    return np.stack(path), rates[-1] * np.stack([e["x"].double().numpy() for e in result.errors])


COMPRESSORS: list[Compressor] = [TopK(0.1), HardThreshold(1.0), HardThreshold(0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_as_algorithm_1(rates: list[float], compressor: Compressor) -> None:
    """To float64's precision, errors in units of the update included."""
    path, errors = algorithm_1(rates, compressor)
    ours, left = library(rates, compressor, ErrorFeedback(lr_aware=True), torch.float64)
    np.testing.assert_allclose(ours, path, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(left, errors, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_in_float32_as_near_as_float32_comes(rates: list[float]) -> None:
    path, _ = algorithm_1(rates[:20], TopK(0.1))
    ours, _ = library(rates[:20], TopK(0.1), ErrorFeedback(lr_aware=True), torch.float32)
    np.testing.assert_allclose(ours, path, rtol=1e-4, atol=1e-5)


def test_without_it_old_errors_enter_at_the_new_rate() -> None:
    """The same at a constant rate; not otherwise."""
    for rates, same in ((RATES["constant"], True), (RATES["steps down"], False)):
        path, _ = algorithm_1(rates, TopK(0.1))
        ours, _ = library(rates, TopK(0.1), ErrorFeedback(), torch.float64)
        assert np.allclose(ours, path, rtol=1e-9) == same


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_nothing_is_lost_in_units_of_the_update(compressor: Compressor) -> None:
    """x₀ − x_T = mean_i Σ_t γ_t·g_i,t − mean_i e_i: what ``conserves`` cannot promise otherwise."""
    rates, problem = RATES["jumps"], Quadratics()
    path, errors = library(rates, compressor, ErrorFeedback(lr_aware=True), torch.float64)
    before = [np.zeros(D), *path[:-1]]
    due = sum(r * problem.gradients(before[t], t).mean(0) for t, r in enumerate(rates))
    np.testing.assert_allclose(-path[-1], due - errors.mean(0), rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [(0,), (7,), (0, 1, 2, 30)])
def test_steps_at_rate_zero(zeros: tuple[int, ...]) -> None:
    """Where a warm-up begins, or anywhere: they add nothing to the error and take nothing out."""
    rates = [0.0 if t in zeros else 0.1 for t in range(STEPS)]
    path, _ = algorithm_1(rates, TopK(0.1))
    ours, _ = library(rates, TopK(0.1), ErrorFeedback(lr_aware=True), torch.float64)
    np.testing.assert_allclose(ours, path, rtol=1e-11, atol=1e-13)


def test_rates_of_parameters_are_followed_one_by_one() -> None:
    run = Lockstep(1, TopK(0.5), ErrorFeedback(lr_aware=True))
    (engine,) = run.engines
    for a, b in ((0.1, 0.2), (0.1, 0.1), (0.05, 0.1)):
        engine.learning_rates.now = {"a": a, "b": b}
        run.step([{"a": torch.tensor([9.0, 1.0]), "b": torch.tensor([9.0, 1.0])}])
    errors = {name: error.tolist() for name, error in engine.errors().items()}
    assert errors["a"] == pytest.approx([0, (1 + 1) * 2 + 1])
    assert errors["b"] == pytest.approx([0, 1 * 2 + 1 + 1])
