"""Auto with seconds that follow from the step and the choice, so that its runs can be repeated."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_gc import Identity, Menu, PerParameter, PowerSGD, TopK
from lightning_gc.controllers import Auto, Decision, Observation, Weighed

MENU = Menu(
    {
        "topk": PerParameter(TopK(0.2)),
        "powersgd": PerParameter(PowerSGD(2)),
        "dense": PerParameter(Identity()),
    }
)


@dataclass(frozen=True)
class Scripted(Auto):
    """Sees other seconds than those of the clock.

    Attributes:
        first: seconds of a step with each choice; what is not named takes a second.
        changes: step from which on the second kind of seconds holds.
        then: these seconds.
    """

    first: tuple[tuple[str, float], ...] = (("powersgd", 0.5), ("topk", 0.6))
    changes: int = 10**9
    then: tuple[tuple[str, float], ...] = ()

    def init(self) -> dict[str, Any]:
        return super().init() | {"steps": 0}

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        steps = state["steps"] + observation.steps
        known = dict(self.then if steps >= self.changes else self.first)
        took = known.get(state["name"], 1.0)
        weighed = observation.weighed
        if weighed is not None:
            more = [
                c._replace(step_seconds=known.get(c.name, 1.0) - took) for c in weighed.candidates
            ]
            weighed = Weighed(0.0, tuple(more))
        told = replace(
            observation,
            step_seconds=took,
            each_step=(took,) * min(observation.steps, 64),
            weighed=weighed,
            exchanges=(),
            bandwidth_gbps=0.0,
        )
        decision, new = super().decide(told, state)
        return decision, new | {"steps": steps}
