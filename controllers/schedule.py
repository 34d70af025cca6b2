"""Set levels by a fixed sequence, one per epoch or per equal part of the run (Schedule)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, Level, Observation, State

_DGC = (0.25, 0.063, 0.015, 0.004, 0.001)


@dataclass(frozen=True)
class Schedule(Controller):
    """Use a fixed sequence of levels, and keep the last one.

    Args:
        levels: in order; None sends uncompressed.
        by: ``"epoch"``, one level per epoch; ``"progress"``, the levels in equal parts of the run,
            rounded to whole epochs: a run of fewer epochs than levels leaves some of them out, the
            last one too.

    Raises:
        ValueError: no levels, an invalid one, an unknown ``by``; ``"progress"`` in a run without an
            end.

    Example:
        >>> from lightning_gc.controllers import Observation, Schedule
        >>> schedule = Schedule((0.25, 0.05, 0.01))
        >>> [schedule.decide(Observation(e), {})[0].level for e in (-1, 0, 1, 2)]
        [0.25, 0.05, 0.01, 0.01]
    """

    levels: tuple[Level, ...]
    by: Literal["epoch", "progress"] = "epoch"

    def __post_init__(self) -> None:
        if not self.levels:
            refuse("Schedule", "at least one level is needed", levels=())
        super().__post_init__()

    @classmethod
    def dgc_warmup(cls, final: float = 0.001, epochs: int = 5) -> Schedule:
        """Return Deep Gradient Compression's warm-up: exponentially falling densities.

        Args:
            final: density after the warm-up.
            epochs: its length; ``final ** ((i + 1) / epochs)`` in its i-th epoch, rounded as
                published (0.25, 0.063, 0.015, 0.004, 0.001) for the published case.

        Reference:
            Lin et al., "Deep Gradient Compression", ICLR 2018.
        """
        if not 0 < final <= 1 or epochs < 1:
            why = "the density must be in (0, 1], and at least one epoch is needed"
            refuse("Schedule.dgc_warmup", why, final=final, epochs=epochs)
        if (final, epochs) == (_DGC[-1], len(_DGC)):
            return cls(_DGC)
        return cls(tuple(final ** ((i + 1) / epochs) for i in range(epochs)))

    def known_levels(self) -> tuple[Level, ...]:
        return self.levels

    def init(self) -> State:
        return {}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        index = turn_of(self, observation, len(self.levels), self.by)
        reason = f"Level {index + 1} of {len(self.levels)} on the schedule."
        return Decision(self.levels[index], reason=reason), state


def turn_of(owner: Controller, observation: Observation, values: int, by: str) -> int:
    """Return the index of the current value, one per epoch or per part of the run."""
    index = observation.epoch + 1
    if by == "progress":
        if not observation.max_epochs:
            raise ValueError(
                f"{type(owner).__name__}(by='progress') needs to know the end; set "
                f"Trainer(max_epochs=...)."
            )
        index = index * values // observation.max_epochs
    return min(index, values - 1)
