"""Choose levels by parameter that send fewest bytes at the error of one common level."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Controller, Decision, Level, Needs, Observation, State
from .knapsack import Option, solve
from .level_plan import check_settings, finite, replaced, squared, totals


@dataclass(frozen=True)
class LayerBudget(Controller):
    """Send as few bytes as possible at the squared error that a common level would have.

    At the end of every ``interval``-th epoch, with ``ε_l(c)²`` the squared error that level c
    leaves of parameter l's gradient, summed over the epoch, and ``s_l(c)`` its bytes, the levels
    are those that minimise ``Σ s_l(c_l)`` subject to ``Σ ε_l(c_l)² ≤ error·Σ ε_l(reference)²``. A
    plan is kept unless a new one saves 3 % of its bytes, or it exceeds the new budget: a change of
    rank redraws PowerSGD's factors. The budget is never exceeded, unless even the levels of least
    error do; then these are taken, with a warning.

    For sparsifiers the optimum is one common threshold, which ``HardThreshold`` has without any of
    this; ranks and bits gain more. Fewer bytes at equal squared error are not fewer at equal loss:
    compare with a common level that sends equally many bytes.

    Args:
        reference: the common level, one of ``levels``. All parameters have it during the first
            epoch.
        levels: that a parameter may have. Leave out the lowest to set a floor.
        error: the budget in units of the reference's error; more sends less.
        relative: weigh each parameter's error by ``1/‖x_l‖²``, so that parameters of small
            gradients, which matter as much to Adam, are not starved.
        interval: epochs between plans.

    Raises:
        ValueError: settings out of range, a reference that is not among the levels.

    Example:
        >>> from lightning_gc.controllers import Curve, LayerBudget, Observation, Point
        >>> flat = Curve(9.0, (Point(1, 3.0, 100), Point(4, 2.9, 400)))  # rank 4 gains little here
        >>> steep = Curve(9.0, (Point(1, 8.0, 100), Point(4, 1.0, 400)))
        >>> budget = LayerBudget(reference=4, levels=(1, 4), error=1.1)
        >>> seen = Observation(0, error_curves={"flat": flat, "steep": steep})
        >>> decision, _ = budget.decide(seen, budget.init())
        >>> decision.levels
        {'flat': 1}

    Reference:
        Markov, Alimohammadi, Frantar and Alistarh, "L-GreCo: Layerwise-Adaptive Gradient
        Compression for Efficient and Accurate Deep Learning", MLSys 2024. Our reading: of the
        paper, not of its code; solved once an epoch.
    """

    reference: float = 4.0
    levels: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
    error: float = 1.0
    relative: bool = False
    interval: int = 1
    limits = {"error": "(0, inf) a factor", "interval": "[1, inf) the number of epochs"}

    def __post_init__(self) -> None:
        check_settings(self, self.levels, "reference", self.reference)

    @property
    def needs(self) -> Needs:
        return Needs(curves=self.levels)

    def known_levels(self) -> tuple[Level, ...]:
        return (self.reference,)  # others, to choose from, may be clamped: their points coincide

    def init(self) -> State:
        return {"plan": {}}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        curves, plan = finite(observation.error_curves, self.levels), dict(state["plan"])
        if not curves or (observation.epoch + 1) % self.interval:
            reason = "No new error curves, so levels stay."
            return Decision(self.reference, plan, reason), state
        dense = totals(curves, {}, self.reference, self.relative)
        budget = self.error * dense.error
        items = [
            [Option(squared(curve, p, self.relative), p.nbytes) for p in curve.points]
            for curve in curves.values()
        ]
        new = replaced(plan, curves, solve(items, budget), self.reference)
        before, after = (
            totals(curves, each, self.reference, self.relative) for each in (plan, new)
        )
        keeps = before.error <= budget and after.nbytes > _WORTH * before.nbytes
        if keeps:
            new, after = plan, before
        warning = ""
        if after.error > budget * (1 + 1e-9):  # sums of the same numbers may differ
            warning = (
                f"{self!r}: even the levels of least error have {after.error / dense.error:.3g} "
                f"times the reference's; raise error, or give levels that send more."
            )
        saved = 1 - after.nbytes / dense.nbytes if dense.nbytes else 0.0
        used = after.error / budget if budget else 0.0
        fewest = sum(
            level == min(c.points, key=lambda p: p.nbytes).level
            for c, level in ((c, new.get(n, self.reference)) for n, c in curves.items())
        )
        figures = {
            "bytes_saved": saved,
            "error_used": used,
            "share_at_fewest": fewest / len(curves),
        }
        what = "The plan stays" if keeps else f"A new plan for {len(curves)} parameters"
        reason = f"{what}: {saved:.0%} of the bytes saved at {used:.2f} of the error's budget."
        return Decision(self.reference, new, reason, figures, warning), {"plan": new}


_WORTH = 0.97
"""A plan with more than this share of the old one's bytes is not worth a change."""
