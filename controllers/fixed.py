"""Keep one level for the complete run (Fixed)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Controller, Decision, Level, Observation, State


@dataclass(frozen=True)
class Fixed(Controller):
    """Keep one level for the whole run.

    Args:
        level: of the compressor's knob; None sends everything uncompressed.

    Raises:
        ValueError: ``level`` is negative or not a number.

    Example:
        >>> from lightning_gc.controllers import Fixed, Observation
        >>> Fixed(0.01).decide(Observation(epoch=3), {})[0].level
        0.01
    """

    level: Level

    def known_levels(self) -> tuple[Level, ...]:
        return (self.level,)

    def init(self) -> State:
        return {}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        return Decision(self.level, reason="The level is fixed."), state
