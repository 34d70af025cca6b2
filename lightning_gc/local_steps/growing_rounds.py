"""GrowingRounds: longer rounds as the learning rate falls (quadratic synchronisation rule)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gc.settings import Settings


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
