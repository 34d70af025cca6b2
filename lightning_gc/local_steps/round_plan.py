"""Settings of local steps: RoundPlan, GrowingRounds, OuterSGD and RadialDirectional."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from lightning_gc.core.settings import Settings
from lightning_gc.local_steps.inner_moments import InnerMoments

MIXED = 0.5
"""Share of a worker's own weights in ``merge="mix"``."""


@dataclass(frozen=True)
class RoundPlan:
    """When a round of H steps exchanges which fragment.

    Fragment i of P is exchanged after ``⌈(i + 1)·H/P⌉`` steps of the round, so each every H steps.
    Its result is taken over ``delay`` steps later, while training continues.

    Args:
        owner: the strategy, for error messages.
        every: H.
        fragments: P, at least 1. More make smaller messages, one after the other.
        delay: steps, fewer than between two exchanges. 0: workers wait for the result.
        merge: with a delay, ``"rebase"``: to the new common weights is added how far the worker has
            come since it has sent; ``"mix"``: the mean of these and its own weights.
        moments: of the optimizers that are averaged too. None: each worker keeps its own.
        growing: decides on H of each round; ``every`` is the fewest then. None: H is ``every``.

    Raises:
        ValueError: not a number of steps or fragments, or too large a delay.
    """

    owner: str
    every: int
    fragments: int = 1
    delay: int = 0
    merge: Literal["rebase", "mix"] = "rebase"
    moments: InnerMoments | None = None
    growing: GrowingRounds | None = None

    def __post_init__(self) -> None:
        self._check("every", self.every, 1, "optimizer steps between two exchanges", 32)
        self._check("fragments", self.fragments, 1, "parts of the parameters", 1)
        self._check("delay", self.delay, 0, "steps until the result is taken over", 0)
        if self.fragments > self.every:
            raise ValueError(
                f"{self.owner}(every={self.every}, fragments={self.fragments}): at most one "
                f"fragment is exchanged after a step; use fragments={self.every} or fewer."
            )
        apart = self.every // self.fragments
        if self.delay >= apart:
            raise ValueError(
                f"{self.owner}(delay={self.delay}): two exchanges are {apart} steps apart, and a "
                f"result must have been taken over before the next one; use delay={apart - 1} or "
                f"less, or exchange less often."
            )
        if self.merge not in ("rebase", "mix"):
            raise ValueError(f"{self.owner}(merge={self.merge!r}): use 'rebase' or 'mix'.")
        if self.moments is not None and self.delay:
            raise ValueError(
                f"{self.owner}(moments={self.moments!r}, delay={self.delay}): a mean of moments "
                f"from {self.delay} steps ago would undo the optimizer's steps since; use delay=0, "
                f"or moments=None."
            )

    @classmethod
    def of(cls, owner: str, every: int | GrowingRounds, *others: Any) -> RoundPlan:
        """Return the plan of rounds of so many steps, or of growing ones; then as for the class."""
        growing = every if isinstance(every, GrowingRounds) else None
        steps = every.base if isinstance(every, GrowingRounds) else every
        return dataclasses.replace(cls(owner, steps, *others), growing=growing)

    def due(self, position: int, length: int) -> list[int]:
        """Return the fragment that is exchanged after ``position`` steps of a round, if any.

        Args:
            position: steps of the round that are done.
            length: H of this round, at least ``every``.
        """
        ends = [-(-(index + 1) * length // self.fragments) for index in range(self.fragments)]
        return [index for index, end in enumerate(ends) if end == position]

    def _check(self, name: str, value: Any, least: int, what: str, such_as: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{self.owner}({name}={value!r}): give the number of {what}, {least} or more; "
                f"use {such_as}."
            )


@dataclass(frozen=True)
class GrowingRounds(Settings):
    """Let a round have ``H = max(base, ⌊(α/η)²⌋)`` steps, where η is the learning rate.

    As η falls workers drift apart more slowly, so that rounds may be longer for the same distance.
    η is the largest learning rate of the last step before the round, mean over workers. The first
    round, and one before which η has risen since the round before, as in a warm-up, has ``base``
    steps.

    Args:
        alpha: α, above 0, in units of the learning rate: H = 1 where η = α. Higher exchanges less
            often. With a largest rate η₀ a first try is ``η₀·√base``.
        base: fewest steps of a round, at least 1.
        longest: most steps of a round; None: up to the end of the run.

    Raises:
        ValueError: a value outside these ranges.

    Example:
        >>> from lightning_gc import GrowingRounds
        >>> rounds = GrowingRounds(alpha=0.02, base=4)
        >>> [rounds.length(rate, before=0.01) for rate in (0.01, 0.005, 0.002)]
        [4, 16, 100]

    Reference:
        Gu, Lyu, Arora, Zhang and Huang, "A Quadratic Synchronization Rule for Distributed Deep
        Learning", ICLR 2024.
    """

    alpha: float
    base: int = 4
    longest: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ValueError(
                f"GrowingRounds(alpha={self.alpha!r}): it must be above 0, in units of the "
                f"learning rate; use the largest rate times √base."
            )
        for name, steps in (("base", self.base), ("longest", self.longest)):
            if steps is not None and (not isinstance(steps, int) or steps < 1):
                raise ValueError(
                    f"GrowingRounds({name}={steps!r}): give a number of steps, 1 or more."
                )
        if self.longest is not None and self.longest < self.base:
            raise ValueError(
                f"GrowingRounds(base={self.base}, longest={self.longest}): the longest round has "
                f"fewer steps than the shortest; exchange the two."
            )

    def length(self, rate: float, before: float | None) -> int:
        """Return H of a round.

        Args:
            rate: η, before the round.
            before: η before the round before it; None in the first one.
        """
        if before is None or rate > before:
            return self.base
        most = 2**62 if self.longest is None else self.longest
        squared = (self.alpha / rate) ** 2 if rate > 0 else math.inf
        return max(self.base, math.floor(min(squared, most)))


@dataclass(frozen=True)
class OuterSGD(Settings):
    """SGD on the common weights θ, with the mean Δ̄ over workers of "θ minus own weights".

    ``v ← μ·v + Δ̄``, then ``θ ← θ − η·v``, or with ``nesterov`` ``θ ← θ − η·(Δ̄ + μ·v)``, as
    ``torch.optim.SGD`` does. The default, η = 1 and μ = 0, averages the workers' weights (local
    SGD). Momentum costs one float32 per parameter, the same on all workers.

    Args:
        lr: η, above 0, constant. Above 1 goes beyond the mean of the weights, below 1 stays behind.
        momentum: μ, in [0, 1). Higher averages over more rounds; needs hundreds of them.
        nesterov: Nesterov momentum.

    Raises:
        ValueError: a value outside these ranges, ``nesterov`` without momentum.

    Example:
        >>> import torch
        >>> from lightning_gc import OuterSGD
        >>> weights = torch.tensor([1.0, 2.0])
        >>> OuterSGD().step(weights, None, torch.tensor([0.5, -0.5]))
        >>> weights
        tensor([0.5000, 2.5000])
        >>> OuterSGD.diloco()
        OuterSGD(lr=0.7, momentum=0.9, nesterov=True)

    Reference:
        Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(
                f"OuterSGD(lr={self.lr!r}): the outer learning rate must be above 0; use 1.0, "
                f"which averages the workers' weights."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"OuterSGD(momentum={self.momentum!r}): it must be in [0, 1); use 0.9, or 0.0 for "
                f"none."
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "OuterSGD(nesterov=True) needs momentum; use OuterSGD.diloco(), or nesterov=False."
            )

    @classmethod
    def diloco(cls) -> OuterSGD:
        """Return DiLoCo's settings."""
        return cls(lr=0.7, momentum=0.9, nesterov=True)

    def step(self, weights: Tensor, velocity: Tensor | None, mean: Tensor) -> None:
        """Make one step.

        Products are rounded before they are added: whether they are fused depends on a device's
        instructions, and on an element's place, and all workers must get the same bits.

        Args:
            weights: θ, changed in place.
            velocity: v, changed in place; None without momentum.
            mean: Δ̄, left as it is.
        """
        update = mean
        if velocity is not None:
            velocity.mul_(self.momentum).add_(mean)
            update = (velocity * self.momentum).add_(mean) if self.nesterov else velocity
        weights.sub_(update * self.lr)


@dataclass(frozen=True)
class RadialDirectional(Settings):
    """Average norms and directions of the workers' distances separately, then step as ``sgd`` does.

    ``Δ̄ = N·φ(Σ_i w_i·φ(Δ_i)/Σ_i w_i)``, ``N = Σ_i w_i·‖Δ_i‖/Σ_i w_i``, ``φ(x) = x/max(‖x‖, 1e-12)``

    for each tensor; the weights of ``nn.Embedding`` get the plain mean. w_i are the weights of
    ``Unequal``, by default 1. Distances of workers that disagree cancel in a mean, so that it is
    shorter than each; here the step keeps their mean length.

    Each worker compresses ``w_i·W/Σ_j w_j·φ(Δ_i)``, so its error is in units of directions. Law:
    directions are conserved. The mean that arrives is lengthened to N, so a sparse one would be
    stretched; sparsifiers are refused.

    Args:
        sgd: the step with Δ̄.

    Communication pattern:
        A gather of 4 bytes for each worker and tensor before the exchange.

    Example:
        >>> from lightning_gc import OuterSGD, RadialDirectional
        >>> RadialDirectional(OuterSGD.diloco()).momentum
        0.9

    Reference:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026.
    """

    sgd: OuterSGD = OuterSGD()

    def __post_init__(self) -> None:
        if not isinstance(self.sgd, OuterSGD):
            raise ValueError(
                f"RadialDirectional(sgd={self.sgd!r}): give an instance, such as OuterSGD()."
            )

    @property
    def lr(self) -> float:
        """η of ``sgd``."""
        return self.sgd.lr

    @property
    def momentum(self) -> float:
        """μ of ``sgd``."""
        return self.sgd.momentum

    def step(self, weights: Tensor, velocity: Tensor | None, mean: Tensor) -> None:
        """Make one step with Δ̄, as ``OuterSGD.step`` does."""
        self.sgd.step(weights, velocity, mean)


Outer: TypeAlias = OuterSGD | RadialDirectional
"""Steps of the common weights."""
