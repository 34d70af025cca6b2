"""Use one controller for the first epochs, such as a warm-up, then another (Chain)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .base import Controller, Decision, KnobLike, Needs, Observation, State


@dataclass(frozen=True)
class Chain(Controller):
    """Let ``first`` decide for the epochs before ``at_epoch``, and ``then`` for the others.

    For the second one epochs, progress and budget start at ``at_epoch``, and its first observation
    is the one of a new run.

    Args:
        first: controller of epochs 0 to ``at_epoch − 1``.
        then: controller of the other epochs.
        at_epoch: first epoch of the second controller, at least 1.

    Raises:
        ValueError: ``at_epoch`` below 1, or a controller's own error.

    Example:
        >>> from lightning_gc.controllers import Accordion, Chain, Schedule
        >>> warm = Chain(Schedule.dgc_warmup(0.01), Accordion(low=0.1, high=0.01), at_epoch=5)
    """

    first: Controller
    then: Controller
    at_epoch: int
    limits = {"at_epoch": "[1, inf)"}

    def __post_init__(self) -> None:
        try:
            self.needs  # noqa: B018 - raises
        except ValueError as error:
            raise ValueError(f"{self!r}: {error}") from error

    @property
    def needs(self) -> Needs:
        return self.first.needs | self.then.needs

    def check(self, knob: KnobLike | None) -> None:
        self.first.check(knob)
        self.then.check(knob)

    def init(self) -> State:
        return {"first": self.first.init(), "then": self.then.init(), "over": 0.0}

    def deciding(self, epoch: int) -> tuple[Controller, int]:
        if epoch < self.at_epoch:
            return self.first.deciding(epoch)
        controller, first = self.then.deciding(epoch - self.at_epoch)
        return controller, first + self.at_epoch

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        if observation.epoch + 1 < self.at_epoch:
            decision, new = self.first.decide(observation, state["first"])
            return decision, {**state, "first": new}
        epochs, over = observation.max_epochs, observation.progress
        begins = observation.ended and observation.epoch + 1 == self.at_epoch
        since = (over or 0.0) if begins else state["over"]
        shifted = replace(
            observation,
            epoch=observation.epoch - self.at_epoch,
            max_epochs=None if epochs is None else epochs - self.at_epoch,
            progress=None if over is None else (over - since) / max(1 - since, 1e-9),
        )
        if begins:  # as in a new run, before the first measurement
            shifted = Observation(
                shifted.epoch,
                shifted.next_learning_rate,
                shifted.next_learning_rate,
                total_error=shifted.total_error,  # of the whole run, for the log
                total_error_update=shifted.total_error_update,
                rates_ahead=shifted.rates_ahead,
                num_elements=shifted.num_elements,
                sizes=shifted.sizes,
                num_compressed=shifted.num_compressed,
                max_epochs=shifted.max_epochs,
                progress=shifted.progress,
            )
        decision, new = self.then.decide(shifted, state["then"])
        return decision, {**state, "then": new, "over": since}
