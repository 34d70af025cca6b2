"""SIDCo: fit a sparsity-inducing distribution to the magnitudes, in stages, for a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.compressors.sparsifiers.topk_selection import ThresholdEstimator
from lightning_gc.core import payload_validation

_FIRST = 0.25  # the share that every stage but the last lets through


@dataclass(frozen=True)
class SIDCo(ThresholdEstimator):
    """Send elements beyond the quantile of a sparsity-inducing distribution, fitted in stages.

    A stage fits a distribution to what is beyond the threshold η of the stage before (at first 0),
    with mean μ and variance σ² of ``|x| − η``, and lets through a quarter; the last one lets
    through what makes the whole ``density``. For a share r the next threshold is

    - ``"exponential"``: ``η − μ·ln r``;
    - ``"pareto"`` (generalised, by moments): ``η + b·(1 − r^c)/c`` with ``b = μ·(μ²/σ² + 1)/2`` and
      ``c = (μ²/σ² − 1)/2``;
    - ``"gamma"`` in the first stage and ``"pareto"`` after it: ``−β·(ln r + ln Γ(α))``, with
      ``s = ln μ − mean ln|x|``, ``α = (3 − s + √((s − 3)² + 24s)) / (12s)``, ``β = μ/α``: our
      reading of the paper's closed form for small r; use few stages.

    Args:
        density: wanted share of elements, in (0, 1]. Lower means more compression, more error.
        fit: the distribution.
        stages: how many, at least 1 (the paper varies it); fewer for a large ``density``.

    Example:
        >>> from lightning_gc import SIDCo
        >>> SIDCo(0.001, fit="pareto").stages
        3

    Reference:
        Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient
        Compression Technique for Distributed Training Systems", MLSys 2021.
    """

    fit: Literal["exponential", "pareto", "gamma"] = "exponential"
    stages: int = 3
    limits = {"stages": "[1, inf)"}

    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        wanted = k / magnitudes.numel()
        stages = min(self.stages, max(1, math.ceil(math.log(wanted, _FIRST))))
        shares = [_FIRST] * (stages - 1) + [wanted / _FIRST ** (stages - 1)]
        later = _exponential if self.fit == "exponential" else _pareto
        threshold = magnitudes.new_zeros(())
        for stage, share in enumerate(shares):
            excess = _Excess(magnitudes, threshold)
            quantile = _gamma if self.fit == "gamma" and not stage else later
            raised = threshold + quantile(excess, share)
            threshold = raised.where(excess.number >= 2, threshold)
        return threshold

    @classmethod
    def examples(cls) -> tuple[SIDCo, ...]:
        return (cls(0.1), cls(0.1, "pareto", 2), cls(0.1, "gamma", 1))


class _Excess:
    """Excesses of magnitudes above a threshold; their number stays on the device.

    On the host the others are left out, which saves time; elsewhere the host would have to wait for
    their number, so they stay as zeros.
    """

    def __init__(self, magnitudes: Tensor, threshold: Tensor) -> None:
        beyond = magnitudes > threshold
        self.number = beyond.count_nonzero()
        self._others = None if payload_validation.on_host(beyond) else ~beyond
        found = magnitudes[beyond] if self._others is None else magnitudes
        self.values = self._only(found - threshold)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of numbers, one for each of ``values``."""
        return self._only(values).sum() / self.number.clamp_min(1)

    def _only(self, values: Tensor) -> Tensor:
        return values if self._others is None else values.masked_fill(self._others, 0.0)


def _exponential(excess: _Excess, share: float) -> Tensor:
    return -excess.mean(excess.values) * math.log(share)


def _pareto(excess: _Excess, share: float) -> Tensor:
    mean = excess.mean(excess.values)
    variance = excess.mean((excess.values - mean).square())
    ratio = mean.square() / variance  # infinite where all are equal
    # By moments. ``shape`` is −ξ of the generalised Pareto distribution.
    scale, shape = mean * (ratio + 1) / 2, (ratio - 1) / 2
    quantile = -scale * torch.expm1(shape * math.log(share)) / shape
    plain = _exponential(excess, share)  # its limit for shape 0
    return torch.where(quantile.isfinite() & (shape.abs() > 1e-6), quantile, plain)


def _gamma(excess: _Excess, share: float) -> Tensor:
    mean = excess.mean(excess.values)
    s = (mean.log() - excess.mean(excess.values.log())).clamp_min(1e-6)
    # The closed form is within 1.5 % of the shape of greatest likelihood.
    alpha = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
    # The paper's formula for the quantile. It is exact if alpha is 1.
    quantile = -mean / alpha * (math.log(share) + torch.lgamma(alpha))
    return quantile.clamp_min(0)
