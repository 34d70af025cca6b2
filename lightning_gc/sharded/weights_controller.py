"""BothKnobs: one controller for levels of gradients, and one for levels of gathered weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_gc.control.control_loop import decision_of
from lightning_gc.controllers import Controller, Decision, Needs, Observation
from lightning_gc.controllers.base import KnobLike, State
from lightning_gc.core.combinations import judge
from lightning_gc.exchange.validation import make_controller
from lightning_gc.sharded.unit_gathers import WeightSettings


@dataclass(frozen=True)
class BothKnobs(Controller):
    """Let one controller set the levels of gradients, and another the levels of weights.

    Made by ``with_weights``. If both exist, the second one decides between epochs only. It sees the
    weights' sizes and levels in place of the gradients'.

    Args:
        gradients: sets ``Decision.level``; None keeps the levels of gradients.
        weights: sets ``Decision.weights``.
    """

    gradients: Controller | None
    weights: Controller

    @property
    def needs(self) -> Needs:
        """Observations for the gradients' controller; the other one needs none."""
        return Needs() if self.gradients is None else self.gradients.needs

    def init(self) -> State:
        """Return the states of both."""
        own = {} if self.gradients is None else self.gradients.init()
        return {"gradients": own, "weights": self.weights.init()}

    def check(self, knob: KnobLike | None) -> None:
        """Check the gradients' controller; ``with_weights`` has checked the other one."""
        if self.gradients is not None:
            self.gradients.check(knob)

    def deciding(self, epoch: int) -> tuple[Controller, int]:
        """Return what decides within an epoch."""
        return (self.gradients or self.weights).deciding(epoch)

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        """Return one decision with the levels of both."""
        decision, new = Decision(None, keeps_levels=True), dict(state)
        if self.gradients is not None:
            decision, new["gradients"] = decision_of(
                self.gradients, observation, state["gradients"]
            )
            if not observation.ended:
                return decision, new
        sizes, levels = observation.weight_sizes, observation.weight_levels
        seen = replace(observation, sizes=sizes, levels=levels, num_compressed=sum(sizes.values()))
        chosen, new["weights"] = decision_of(self.weights, seen, state["weights"])
        both = replace(
            decision,
            reason=f"{decision.reason} Weights: {chosen.reason}".strip(),
            figures={**decision.figures, **{f"weight_{n}": v for n, v in chosen.figures.items()}},
            warning=f"{decision.warning} {chosen.warning}".strip(),
            weights=None if chosen.keeps_levels else (chosen.level, chosen.levels),
        )
        return both, new


def with_weights(
    owner: str,
    controller: Controller | None,
    weights_controller: Controller | str | None,
    settings: WeightSettings | None,
) -> Controller | None:
    """Return the controller of both knobs; ``controller`` if weights have none.

    Args:
        owner: the class or function with these arguments, for error messages.
        controller: of gradients, checked.
        weights_controller: of weights, as given.
        settings: of the gathers; None: weights are not compressed.

    Raises:
        ValueError: weights have no level, or the controller cannot set it.
    """
    if weights_controller is None:
        return controller
    weights_controller = make_controller(weights_controller, owner, "weights_controller")
    judge(
        "weights_controller",
        owner,
        controller=weights_controller,
        settings=settings,
        measures=weights_controller.needs != Needs(),
        other=controller,
        of_gradients=type(controller).__name__,
    )
    assert settings is not None
    weights_controller.check(settings.knob)
    return BothKnobs(controller, weights_controller)
