"""Sparsifiers that estimate a threshold match NumPy and meet the requested density."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import GaussianK, RedSync, SIDCo
from lightning_gc.compressors.sparsifiers.topk_selection import ThresholdEstimator
from lightning_gc.testing.contracts import cases

NUMEL = 20_000
DRAW = torch.Generator().manual_seed(3)
NORMAL = torch.randn(NUMEL, generator=DRAW)
UNIFORM = torch.rand(NUMEL, generator=DRAW).clamp_min(1e-7)
KINDS = {
    **cases.tensors(NUMEL),
    "Laplace": -UNIFORM.log() * NORMAL.sign(),
    "Student t, 2 degrees": NORMAL / torch.randn(2, NUMEL, generator=DRAW).norm(dim=0) * 2**0.5,
    "bfloat16": NORMAL.bfloat16().float(),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
densities = pytest.mark.parametrize("density", [0.3, 0.01, 0.001])


def gaussian(a: np.ndarray, k: int) -> float:
    threshold = math.sqrt((a**2).mean()) * NormalDist().inv_cdf(1 - k / len(a) / 2)
    for _ in range(3):
        share = (a >= threshold).sum() / k
        threshold *= 0.5 if share < 2 / 3 else 1.5 if share > 4 / 3 else 1.0
    return threshold


def redsync(a: np.ndarray, k: int) -> float:
    low, high = 0.0, 1.0
    while True:
        r = (low + high) / 2
        threshold = a.mean() + r * (a.max() - a.mean())
        number = (a >= threshold).sum()
        if k <= number <= 2 * k or (high - low) / 2 < 1e-3:
            return float(threshold)
        low, high = (low, r) if number < k else (r, high)


def sidco(a: np.ndarray, k: int, fit: str, stages: int) -> float:
    delta, eta = k / len(a), 0.0
    stages = min(stages, max(1, math.ceil(math.log(delta, 0.25))))
    for stage in range(stages):
        r = 0.25 if stage < stages - 1 else delta / 0.25 ** (stages - 1)
        e = a[a > eta] - eta
        if len(e) < 2:
            break
        mean, variance = e.mean(), e.var()
        if fit == "gamma" and stage == 0:
            s = max(math.log(mean) - np.log(e).mean(), 1e-6)
            alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
            eta = max(0.0, -mean / alpha * (math.log(r) + math.lgamma(alpha)))
        elif fit == "exponential" or variance < 1e-12:
            eta += -mean * math.log(r)
        else:
            b = mean * (mean**2 / variance + 1) / 2
            c = (mean**2 / variance - 1) / 2
            eta += b * (1 - r**c) / c if abs(c) > 1e-6 else -mean * math.log(r)
    return eta


METHODS = {
    "GaussianK": (GaussianK(), gaussian),
    "RedSync": (RedSync(), redsync),
    "exponential": (SIDCo(), lambda a, k: sidco(a, k, "exponential", 3)),
    "pareto": (SIDCo(fit="pareto", stages=2), lambda a, k: sidco(a, k, "pareto", 2)),
    "gamma": (SIDCo(fit="gamma", stages=1), lambda a, k: sidco(a, k, "gamma", 1)),
}
each_method = pytest.mark.parametrize("method", METHODS)


def selected(codec: ThresholdEstimator, x: Tensor) -> Tensor:
    return codec.choose(x, cases.bucket_of(x))


@each_method
@each_kind
@densities
def test_what_is_beyond_the_threshold_is_sent(method: str, kind: str, density: float) -> None:
    """Give or take what lies within a rounding error of it; the largest where that is too much."""
    codec, reference = METHODS[method]
    x = KINDS[kind]
    a = x.abs().double().numpy()
    found = selected(codec.at(density), x).numpy()
    k = round(density * NUMEL)
    if not a.any():
        assert not len(found)
        return
    threshold = reference(a / a.max(), k) * a.max()
    surely = (a >= threshold * 1.0001) & (a > 0)
    perhaps = (a >= threshold * 0.9999) & (a > 0)
    assert len(found) <= 2 * k
    assert min(surely.sum(), 2 * k) <= len(found) <= perhaps.sum()
    left = np.delete(a, found)
    assert not len(left) or not len(found) or left.max() <= a[found].min() * 1.0001
    assert perhaps[found].all()


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        (GaussianK(), "normal"),
        (GaussianK(), "bfloat16"),
        (SIDCo(stages=1), "Laplace"),
        (SIDCo(stages=3), "Laplace"),
        (SIDCo(fit="pareto", stages=1), "Laplace"),
        (SIDCo(fit="gamma", stages=1), "Laplace"),
    ],
)
@densities
def test_density_is_met_where_the_assumption_is(
    codec: ThresholdEstimator, kind: str, density: float
) -> None:
    """To a quarter, at a thousandth: of 20 elements 5 are one standard deviation."""
    number = selected(codec.at(density), KINDS[kind]).numel()
    assert number == pytest.approx(density * NUMEL, rel=0.25 if density < 0.01 else 0.15)


@pytest.mark.parametrize("kind", ["normal", "Laplace", "Student t, 2 degrees", "all negative"])
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_redsync_sends_k_to_twice_as_many(kind: str, density: float) -> None:
    k = round(density * NUMEL)
    assert k <= selected(RedSync(density), KINDS[kind]).numel() <= 2 * k


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"GaussianK\(density=0"):
        GaussianK(0)
    with pytest.raises(ValueError, match="tolerance"):
        RedSync(tolerance=0)
    with pytest.raises(ValueError, match="fit='normal'"):
        SIDCo(fit="normal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stages=0"):
        SIDCo(stages=0)
