"""RoundPlan: after which steps what is exchanged, and when and how the result is taken over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from lightning_gc.local_steps.growing_rounds import GrowingRounds

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
