"""Set H of local steps so that exchanges take at most a share of the time (Budget)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .base import Controller, Decision, KnobLike, Needs, Observation, State

EASE = 0.8
"""Half of H must keep to this share of the budget, or H stays: else it would go up and down."""


@dataclass(frozen=True)
class Budget(Controller):
    """Choose H, the optimizer steps of a round, so that exchanges take a share of the time at most.

    With ``X`` the seconds of a round's exchange (compression, messages with waiting, decoding) and
    ``R`` those of the whole round, as means since the last decision, an optimizer step takes
    ``c = (R − X)/H``. H becomes the least power of two times ``shortest`` with
    ``X/(H·c + X) ≤ share``. It falls only if half of H takes at most 0.8 of the share, and by a
    half at a time. A decision is due after ``rounds`` rounds; at first after 1, 2 and 4.

    With a ``delay`` an exchange overlaps with training. Its seconds count all the same.

    Seconds differ between two runs, and so may H: a run resumes as it was, but is not repeated bit
    for bit. ``trace`` writes down what was seen and decided; ``replay`` repeats that. A larger H
    also lets workers drift apart for longer: the final loss may change.

    Args:
        share: in (0, 1). Less exchanges less often.
        shortest: least H, and the first one; at least the plan's ``fragments``, and above its
            ``delay``.
        longest: most H.
        rounds: between decisions, each of an all-reduce of a few numbers and a broadcast.
        levels: a controller of levels that decides between epochs; None leaves them as they are. It
            is told of steps and bytes since the last decision of either.
        trace: path of a file; empty for none.

    Raises:
        ValueError: settings out of range. When the strategy is made: one that does not exchange
            every H steps, and elastic workers, which have no worker 0 that stays.

    Example:
        >>> from lightning_gc.controllers import Budget, Observation
        >>> budget = Budget(0.1)
        >>> slow = {"communicate": 0.9, "compress": 0.05, "decode": 0.05}
        >>> seen = Observation(0, steps=1, step_seconds=1.1, phase_seconds=slow)
        >>> budget.decide(seen, budget.init())[0].every
        128

    When to use:
        ``LocalStepsStrategy("cast", every=Budget(0.1))``, where the link's rate is not known before
        the run, or changes.
    """

    share: float = 0.1
    shortest: int = 1
    longest: int = 512
    rounds: int = 4
    levels: Controller | None = None
    trace: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"Budget(share={self.share!r}): a share of the time, such as 0.1.")
        for name in ("shortest", "longest", "rounds"):
            given = getattr(self, name)
            if given < 1:
                raise ValueError(f"Budget({name}={given!r}): give a whole number, 1 or more.")
        if self.longest < self.shortest:
            raise ValueError(
                f"Budget(shortest={self.shortest}, longest={self.longest}): exchange the two."
            )
        levels = self.levels
        if levels is not None and (
            levels.needs.gradients == "first batch" or levels.turns(0) or levels.every_steps(0)
        ):
            raise ValueError(
                f"Budget(levels={levels!r}): it decides within epochs, as Budget does; give one "
                f"that decides between them, such as Accordion(low=0.1, high=0.01)."
            )

    @property
    def steps(self) -> tuple[int, ...]:
        """All H that it may choose, in ascending order."""
        found = [self.shortest]
        while 2 * found[-1] <= self.longest:
            found.append(2 * found[-1])
        return tuple(found)

    @property
    def needs(self) -> Needs:
        own = Needs(seconds=True, rounds=self.steps, trace=self.trace)
        return own if self.levels is None else own | self.levels.needs

    def check(self, knob: KnobLike | None) -> None:
        if self.levels is not None:
            self.levels.check(knob)

    def init(self) -> State:
        return {"every": self.shortest, "levels": {} if self.levels is None else self.levels.init()}

    def every_steps(self, epoch: int) -> int:
        return self.rounds

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        decision, levels = Decision(None, keeps_levels=True), state["levels"]
        if self.levels is not None and observation.ended:
            decision, levels = self.levels.decide(observation, levels)
        every, reason = self._every(observation, state["every"])
        figures = {**decision.figures, "round_budget_steps": float(every)}
        reason = f"{decision.reason} {reason}".strip()
        decision = replace(decision, every=every, reason=reason, figures=figures)
        return decision, {"every": every, "levels": levels}

    def _every(self, observation: Observation, every: int) -> tuple[int, str]:
        """Return H, and why."""
        phases = observation.phase_seconds
        spent = sum(phases.get(phase, 0.0) for phase in ("compress", "communicate", "decode"))
        whole = observation.step_seconds
        if not observation.steps or not 0 < spent < float("inf") or not 0 < whole < float("inf"):
            return every, f"H = {every}, as no seconds of rounds are known yet."
        each = max(whole - spent, 1e-9) / every

        def share(steps: int) -> float:
            return spent / (steps * each + spent)

        enough = next((h for h in self.steps if share(h) <= self.share), self.steps[-1])
        lower = max(every // 2, self.shortest)
        new = enough
        if enough < every:
            new = lower if share(lower) <= EASE * self.share else every
        return new, (
            f"H = {new}: an exchange takes {spent:.3g} s and a step {each:.3g} s, so "
            f"{share(new):.1%} of the time."
        )
