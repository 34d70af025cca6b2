"""Set H of local steps so that exchanges take at most a share of the time (Budget)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .base import Controller, Decision, KnobLike, Needs, Observation, State

EASE = 0.8
"""A smaller H must keep to this share of the budget, or H stays: else it would go up and down.

And a larger H must lower ``X/(H·c)`` to this part of it, or it is taken back.
"""
OFTEN = 3
"""Times ``rounds`` in a row that must see unequal workers: one may be chance."""
PATIENCE = 8
"""Decisions until an H is tried again that has not lowered the share."""


@dataclass(frozen=True)
class Budget(Controller):
    """Choose H, the optimizer steps of a round, so that exchanges take a share of the time at most.

    With ``X`` the seconds of a round's exchange (compression, messages, decoding) and ``R`` those
    of the whole round, as means since the last decision, an optimizer step takes ``c = (R − X)/H``.
    ``X`` leaves out what a worker waits for a slower one, which no H shortens. H becomes the least
    power of two times ``shortest`` with ``X/(H·c + X) ≤ share``. It falls only if that takes at
    most 0.8 of the share. A decision is due after ``rounds`` rounds; at first after 1, 2 and 4, and
    one round after H has more than doubled. The first exchange, in which things start up, decides
    nothing.

    If ``rounds`` rounds of a larger H have not lowered ``X/(H·c)`` to 0.8 of it, H goes back to its
    value before, and does not rise for 8 decisions. If workers wait for the
    slowest for a larger share of the time than ``share``, a warning names ``Unequal``, once.

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
        >>> first, state = budget.decide(seen, budget.init())
        >>> second, state = budget.decide(seen, state)
        >>> first.every, second.every
        (1, 128)

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
    limits = {
        "share": "(0, 1) a share of the time",
        "shortest": "[1, inf)",
        "longest": "[1, inf)",
        "rounds": "[1, inf)",
    }

    def __post_init__(self) -> None:
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
        return {
            "every": self.shortest,
            "levels": {} if self.levels is None else self.levels.init(),
            "begun": False,  # the first exchange is over
            # H, and X/(H·c), before H has risen, until that is judged; and since then rounds, and
            # the sums of X and R over them.
            "before": None,
            "most": None,  # H above which the share did not fall, and decisions that it holds for
            "unequal": 0,  # rounds in a row that saw unequal workers
        }

    def every_steps(self, epoch: int) -> int:
        return self.rounds

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        decision, now = Decision(None, keeps_levels=True), {**self.init(), **state}
        if self.levels is not None and observation.ended:
            decision, now["levels"] = self.levels.decide(observation, now["levels"])
        now, reason = self._every(observation, now)
        now["unequal"], warning = self._unequal(observation, now["unequal"])
        every = now["every"]
        jumps = every > 2 * state["every"]
        figures = {**decision.figures, "round_budget_steps": float(every)}
        reason = f"{decision.reason} {reason}".strip()
        warning = f"{decision.warning} {warning}".strip()
        more = {"every": every, "reason": reason, "figures": figures, "warning": warning}
        return replace(decision, after=1 if jumps else decision.after, **more), now

    def _every(self, observation: Observation, state: State) -> tuple[State, str]:
        """Return the state with the new H, and why."""
        phases, every = observation.phase_seconds, state["every"]
        spent = sum(phases.get(phase, 0.0) for phase in ("compress", "communicate", "decode"))
        whole = observation.step_seconds
        if not observation.steps or not 0 < spent < math.inf or not 0 < whole < math.inf:
            return state, f"H = {every}, as no seconds of rounds are known yet."
        if not state["begun"]:
            return state | {"begun": True}, f"H = {every}, until a second exchange is known."
        each: float = max(whole - spent, 1e-9) / every

        def share(steps: int) -> float:
            return spent / (steps * each + spent)

        before, most, judged = state["before"], state["most"], False
        if before is not None:  # a short epoch ends before enough rounds are seen at once
            sums = (observation.steps * each for each in (1, spent, whole))
            before = [*before[:2], *(a + b for a, b in zip(before[2:], sums, strict=True))]
            judged = before[2] >= self.rounds
        if judged:
            lower, then, rounds, spent, whole = before
            spent, whole = spent / rounds, whole / rounds
            each = max(whole - spent, 1e-9) / every
            if spent / (every * each) > EASE * then and share(every) > self.share:
                return state | {"every": lower, "before": None, "most": [lower, PATIENCE]}, (
                    f"H = {lower}: with {every} steps exchanges have taken {share(every):.1%} of "
                    f"the time, and no less before."
                )
        if judged or before is None:
            before, most = None, [most[0], most[1] - 1] if most is not None and most[1] else None
        highest = every if before is not None else self.longest if most is None else most[0]
        allowed = [steps for steps in self.steps if steps <= max(highest, every)]
        new = next((steps for steps in allowed if share(steps) <= self.share), allowed[-1])
        if new < every and before is not None and every <= 2 * before[0]:
            new = every  # one round may have been quick by chance
        elif new < every:
            new = next(h for h in allowed if h == every or share(h) <= EASE * self.share)
        if new != every:
            before = [every, spent / (every * each), 0, 0.0, 0.0] if new > every else None
        return state | {"every": new, "before": before, "most": most}, (
            f"H = {new}: an exchange takes {spent:.3g} s and a step {each:.3g} s, so "
            f"{share(new):.1%} of the time."
        )

    def _unequal(self, observation: Observation, seen: int) -> tuple[int, str]:
        """Return how many rounds in a row were unequal, and a warning once these are enough."""
        whole, wait = observation.step_seconds, observation.phase_seconds.get("wait", 0.0)
        enough = OFTEN * self.rounds
        if not observation.steps or seen >= enough:
            return seen, ""
        if not 0 < whole < math.inf or not wait > self.share * whole:
            return 0, ""
        seen += observation.steps
        return seen, "" if seen < enough else (
            f"Budget(share={self.share!r}): workers are unequal, and wait {wait / whole:.0%} of "
            f"the time for the slowest. No H shortens that, so H leaves it out. Let slow workers "
            f"make fewer steps: LocalStepsStrategy(..., unequal=Unequal())."
        )
