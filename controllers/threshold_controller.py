"""Define the base class of controllers that choose HardThreshold's threshold."""

from __future__ import annotations

from lightning_gc.core.combinations import judge

from .base import Controller, KnobLike, Needs, Observation


class ThresholdController(Controller):
    """Refuses compressors without a threshold, and logs the total errors."""

    @property
    def needs(self) -> Needs:
        return Needs(errors=True)

    def check(self, knob: KnobLike | None) -> None:
        what = "no level" if knob is None else f"a {knob.field}"
        judge("Controllers of a threshold", controller=self, knob=knob, what=what)

    def _figures(self, observation: Observation) -> dict[str, float]:
        return {
            "total_error": observation.total_error,
            "total_error_update": observation.total_error_update,
        }


def sent_whole(observation: Observation) -> float:
    """Return the share of elements in tensors that the compressor leaves alone."""
    d = observation.num_elements
    return 1 - observation.num_compressed / d if d else 0.0


def nothing_sent(observation: Observation) -> bool:
    """Return whether no element has reached the threshold since the last decision."""
    whole = observation.steps * (observation.num_elements - observation.num_compressed)
    return observation.steps > 0 and observation.sent_elements - whole < 0.5
