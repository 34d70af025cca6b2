"""Set H of local steps by a fixed sequence, with another controller for levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, KnobLike, Needs, Observation, State
from .schedule import turn_of


@dataclass(frozen=True)
class RoundSchedule(Controller):
    """Use a fixed sequence of H, the optimizer steps of a round, and keep the last one.

    For ``LocalStepsStrategy`` and its simulation. A change takes effect with the next round. The
    first value replaces the strategy's ``every``. A larger H sends less, and lets workers drift
    apart for longer; "post-local SGD" begins with H = 1.

    Args:
        every: H in order, each at least 1.
        by: ``"epoch"``, one value per epoch; ``"progress"``, the values in equal parts of the run,
            as for ``Schedule``.
        levels: the controller of levels; None leaves them as they are.

    Raises:
        ValueError: no values, or one below 1; an unknown ``by``. Also ``"progress"`` in a run
            without an end. When the strategy is made: one that does not exchange every H steps, or
            an H too short for its ``delay`` or ``fragments``.

    Example:
        >>> from lightning_gc.controllers import Observation, RoundSchedule
        >>> schedule = RoundSchedule((1, 8, 32))
        >>> [schedule.decide(Observation(e), schedule.init())[0].every for e in (-1, 0, 1, 2)]
        [1, 8, 32, 32]

    Reference:
        Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
    """

    every: tuple[int, ...]
    by: Literal["epoch", "progress"] = "epoch"
    levels: Controller | None = None

    def __post_init__(self) -> None:
        if not self.every:
            refuse("RoundSchedule", "at least one number of steps is needed", every=())
        for steps in self.every:
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                why = f"{steps!r} is not a number of optimizer steps; give integers of 1 or more"
                refuse("RoundSchedule", why, every=self.every)

    @property
    def needs(self) -> Needs:
        own = Needs(rounds=self.every)
        return own if self.levels is None else own | self.levels.needs

    def check(self, knob: KnobLike | None) -> None:
        if self.levels is not None:
            self.levels.check(knob)

    def init(self) -> State:
        return {} if self.levels is None else self.levels.init()

    def deciding(self, epoch: int) -> tuple[Controller, int]:
        return (self, 0) if self.levels is None else self.levels.deciding(epoch)

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        decision = Decision(None, keeps_levels=True)
        if self.levels is not None:
            decision, state = self.levels.decide(observation, state)
        index = turn_of(self, observation, len(self.every), self.by)
        steps = self.every[index]
        reason = f"{decision.reason} H = {steps}, {index + 1} of {len(self.every)} on the schedule."
        return replace(decision, every=steps, reason=reason.strip()), state
