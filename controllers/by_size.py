"""Set levels by the number of elements of a parameter, for the complete run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, Level, Observation, State


@dataclass(frozen=True)
class BySize(Controller):
    """Give large parameters one level and small ones another, for the whole run.

    A fifth of a network's tensors often holds nine tenths of its elements. Compressing these a
    little more pays for sending all others almost uncompressed. Needs no statistics.

    Args:
        levels: smallest number of elements -> level, as ``{4096: 0.1, 65536: 0.01}``; a parameter
            gets the level of the largest number that it reaches. None sends uncompressed.
        default: level of smaller parameters.

    Raises:
        ValueError: no levels, an invalid one, a number of elements below 1.

    Example:
        >>> from lightning_gc.controllers import BySize, Observation
        >>> sizes = {"bias": 256, "small": 5_000, "large": 1_000_000}
        >>> decision, _ = BySize({4096: 0.1, 65536: 0.01}).decide(Observation(-1, sizes=sizes), {})
        >>> decision.level, decision.levels
        (None, {'small': 0.1, 'large': 0.01})

    Reference:
        "LEGACY: A Lightweight Dynamic Gradient Compression Strategy for Distributed Deep Learning",
        ICLR 2026: its strategy by layer size. Sizes and levels are the user's here.
    """

    levels: Mapping[int, Level] | tuple[tuple[int, Level], ...]
    default: Level = None

    def __post_init__(self) -> None:
        pairs = tuple(sorted(dict(self.levels).items(), key=lambda pair: pair[0]))
        object.__setattr__(self, "levels", pairs)  # which can be hashed
        if not pairs:
            refuse("BySize", "at least one level is needed, as {65536: 0.01}", levels={})
        for size, level in (*pairs, (1, self.default)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"BySize(levels={{{size!r}: {level!r}}}): a number of elements is an integer "
                    f"of at least 1."
                )
            self._check_level(level)

    def known_levels(self) -> tuple[Level, ...]:
        return self.default, *dict(self.levels).values()

    def init(self) -> State:
        return {}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        chosen = {name: self.of(size) for name, size in observation.sizes.items()}
        levels = {name: level for name, level in chosen.items() if level != self.default}
        reason = f"By size, {len(levels)} of {len(chosen)} parameters have another level."
        return Decision(self.default, levels, reason), state

    def of(self, numel: int) -> Level:
        """Return the level of a parameter with this number of elements."""
        reached = [level for size, level in dict(self.levels).items() if numel >= size]
        return reached[-1] if reached else self.default
