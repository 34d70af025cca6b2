"""Choose levels by parameter that leave the least error within a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Controller, Decision, Level, Needs, Observation, State
from .knapsack import Option, solve
from .level_plan import check_settings, finite, replaced, squared, totals


@dataclass(frozen=True)
class BytesBudget(Controller):
    """Leave the least squared error within a budget of bytes per step.

    The dual of ``LayerBudget``: at the end of every ``interval``-th epoch, the levels that minimise
    ``Σ ε_l(c_l)²`` subject to ``Σ s_l(c_l) ≤ bytes_per_step``, with the errors ε of the gradients
    summed over the epoch, and bytes s of one worker's messages for the compressed parameters. The
    budget is never exceeded, unless even the levels of fewest bytes do; then these are taken, with
    a warning.

    Args:
        bytes_per_step: of one worker's messages, each counted once; more compresses less.
        levels: that a parameter may have.
        first: of all parameters until the end of the first epoch, one of ``levels``.
        relative: weigh each parameter's error by ``1/‖x_l‖²``.
        interval: epochs between plans.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> from lightning_gc.controllers import BytesBudget, Curve, Observation, Point
        >>> flat = Curve(9.0, (Point(1, 3.0, 100), Point(4, 2.9, 400)))
        >>> steep = Curve(9.0, (Point(1, 8.0, 100), Point(4, 1.0, 400)))
        >>> budget = BytesBudget(500, levels=(1, 4), first=1)
        >>> seen = Observation(0, error_curves={"flat": flat, "steep": steep})
        >>> budget.decide(seen, budget.init())[0].levels
        {'steep': 4}

    Reference:
        Xin, Ilin, Zhang, Canini and Richtárik, "Kimad: Adaptive Gradient Compression with Bandwidth
        Awareness", 2023: its Kimad+. Our reading, with a budget that is given, not measured.
    """

    bytes_per_step: float
    levels: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
    first: float = 4.0
    relative: bool = False
    interval: int = 1
    limits = {"bytes_per_step": "(0, inf); 200_000", "interval": "[1, inf) the number of epochs"}

    def __post_init__(self) -> None:
        check_settings(self, self.levels, "first", self.first)

    @property
    def needs(self) -> Needs:
        return Needs(curves=self.levels)

    def known_levels(self) -> tuple[Level, ...]:
        return (self.first,)  # others, to choose from, may be clamped: their points coincide

    def init(self) -> State:
        return {"plan": {}}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        curves = finite(observation.error_curves, self.levels)
        if not curves or (observation.epoch + 1) % self.interval:
            reason = "No new error curves, so levels stay."
            return Decision(self.first, state["plan"], reason), state
        items = [
            [Option(p.nbytes, squared(curve, p, self.relative)) for p in curve.points]
            for curve in curves.values()
        ]
        plan = replaced(state["plan"], curves, solve(items, self.bytes_per_step), self.first)
        found = totals(curves, plan, self.first, self.relative)
        uniform = totals(curves, {}, self.first, self.relative)
        warning = ""
        if found.nbytes > self.bytes_per_step:
            warning = (
                f"{self!r}: even the levels of fewest bytes send {found.nbytes:,.0f} bytes a step; "
                f"raise bytes_per_step, or give levels that send less."
            )
        figures = {
            "bytes_planned": found.nbytes,
            "error_of_first_level": found.error / uniform.error if uniform.error else 0.0,
        }
        reason = (
            f"{found.nbytes:,.0f} of {self.bytes_per_step:,.0f} bytes a step are planned for "
            f"{len(curves)} parameters."
        )
        return Decision(self.first, plan, reason, figures, warning), {"plan": plan}
