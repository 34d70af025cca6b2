"""Declare the costly observations that a controller needs (Needs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Needs:
    """Observations that a controller needs, each with a cost per step.

    Attributes:
        gradients: ``Observation.gradient_norms`` of the sum over the epoch, or of the epoch's first
            batch; then it also decides after the first step of every epoch. Costs one float32 per
            parameter, and a pass over the gradient.
        moments: ``gradient_noise``, ``gradient_squared`` and ``gradient_dissimilarity``. Costs the
            same, and one dense all-reduce at the end of an epoch.
        errors: ``total_error`` and ``total_error_update``. Costs one pass over the error.
        scale: ``gradient_scale`` and ``rates_ahead``. Costs one pass over the gradient, and one
            over the run's schedule.
        curves: levels of ``error_curves``, computed at the end of an epoch. Costs one
            float32 per parameter, a pass over the gradient, and at the end of an epoch one
            compression per level of every parameter, on worker 0.
        seconds: ``step_seconds`` and ``phase_seconds``. Costs a look at the clock per step.
        link: ``exchanges`` and the link fitted to them. Costs two looks at the clock per request.
        trace: path of a file to which worker 0 appends each observation, state and decision; empty
            for none. ``replay`` reads it.
        rounds: all values of H that it may set in ``Decision.every``; it needs local steps.
            Costs nothing.
    """

    gradients: Literal["none", "epoch sum", "first batch"] = "none"
    moments: bool = False
    errors: bool = False
    scale: bool = False
    curves: tuple[float, ...] = ()
    seconds: bool = False
    link: bool = False
    trace: str = ""
    rounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.curves and self.gradients == "first batch":
            raise ValueError(
                "error curves need the gradients' epoch sum, and the first batch's gradients are "
                "needed too; only one of these is kept."
            )

    @property
    def sums(self) -> Literal["none", "epoch sum", "first batch"]:
        """The gradients to keep: for ``gradient_norms``, or for ``error_curves``."""
        return "epoch sum" if self.curves else self.gradients

    def __or__(self, other: Needs) -> Needs:
        """Return the needs of both controllers.

        Raises:
            ValueError: one needs gradients of the epoch, the other of its first batch.
        """
        wanted = sorted({self.gradients, other.gradients} - {"none"})
        if len(wanted) > 1:
            raise ValueError(
                f"one needs the gradients' {', the other their '.join(wanted)}; only one of these "
                f"is kept."
            )
        return Needs(
            gradients=other.gradients if self.gradients == "none" else self.gradients,
            moments=self.moments or other.moments,
            errors=self.errors or other.errors,
            scale=self.scale or other.scale,
            curves=tuple(sorted({*self.curves, *other.curves})),
            seconds=self.seconds or other.seconds,
            link=self.link or other.link,
            trace=self.trace or other.trace,
            rounds=tuple(sorted({*self.rounds, *other.rounds})),
        )
