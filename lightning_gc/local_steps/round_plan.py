"""RoundPlan: after which steps what is exchanged, and when and how the result is taken over."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.settings import Settings
from lightning_gc.local_steps.outer_sgd import OuterSGD
from lightning_gc.memories import Memory

MIXED = 0.5
"""Share of a worker's own weights in ``merge="mix"``."""


@dataclass(frozen=True)
class RoundPlan:
    """When a round of H steps exchanges which fragment.

    Fragment i of P is exchanged after ``⌈(i + 1)·H/P⌉`` steps of the round, so each every H steps.
    Its result is taken over ``delay`` steps later, while training goes on.

    Args:
        owner: the strategy, for error messages.
        every: H.
        fragments: P, at least 1. More make smaller messages, one after the other.
        delay: steps, fewer than between two exchanges. 0: workers wait for the result.
        merge: with a delay, ``"rebase"``: to the new common weights is added how far the worker has
            come since it has sent; ``"mix"``: the mean of these and its own weights.
        growing: decides on H of each round; ``every`` is the fewest then. None: H is ``every``.

    Raises:
        ValueError: a value that is no number of steps or fragments, or too large a delay.
    """

    owner: str
    every: int
    fragments: int = 1
    delay: int = 0
    merge: Literal["rebase", "mix"] = "rebase"
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


def refuse(
    owner: str,
    compressor: Compressor,
    memory: Memory,
    controller: Controller | None,
    outer: OuterSGD,
) -> None:
    """Raise ValueError for what reads learning rates or gradients, which differences have not.

    What is exchanged is a difference of weights, in which learning rates are contained already.

    Args:
        owner: the strategy, for the sentence.
        compressor: of the differences.
        memory: likewise.
        controller: of levels, or None.
        outer: the outer step.
    """
    if not compressor.traits.conserves:
        raise ValueError(
            f"{owner}({compressor!r}): its workers vote, and the result, of equal magnitude in "
            f"every element, is no mean of how far their weights have come; use EFSignSGD() for "
            f"signs with magnitudes, or QSGD(4)."
        )
    if memory.lr_aware:
        raise ValueError(
            f"{owner}(memory={memory!r}): differences of weights contain the learning rate "
            f"already, so errors must not follow it; use memory=ErrorFeedback()."
        )
    if memory.lookahead or memory.reads_weights:
        raise ValueError(
            f"{owner}(memory={memory!r}): it changes gradients by weights or weights by errors at "
            f"each optimizer step, but here something is exchanged every H steps only; use "
            f"memory=ErrorFeedback()."
        )
    if outer.momentum:
        try:
            memory.check_optimizer({"momentum": outer.momentum})
        except ValueError:
            raise ValueError(
                f"{owner}(memory={memory!r}, outer={outer!r}): the memory has the outer momentum; "
                f"use outer=OuterSGD(lr={outer.lr!r}), or memory=ErrorFeedback()."
            ) from None
    if controller is not None and (controller.needs.errors or controller.needs.scale):
        raise ValueError(
            f"{owner}(controller={controller!r}): it computes with gradients and learning rates, "
            f"but differences of weights contain both; use Accordion or a Schedule."
        )


def check_rounds(owner: str, plan: RoundPlan, controller: Controller | None) -> None:
    """Raise ValueError for a controller whose H the plan cannot have.

    Args:
        owner: the strategy, for the sentence.
        plan: as the strategy begins.
        controller: of H, of levels, or None.
    """
    every = () if controller is None else controller.needs.rounds
    if every and plan.growing is not None:
        raise ValueError(
            f"{owner}(every={plan.growing!r}, controller={controller!r}): both set the steps of a "
            f"round; give every=8, say, or another controller."
        )
    for steps in every:
        dataclasses.replace(plan, every=steps)
