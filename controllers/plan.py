"""Set levels by the names of parameters, for the complete run (Plan)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, Level, Observation, State


@dataclass(frozen=True)
class Plan(Controller):
    """Give parameters the levels that a table of names says, for the whole run.

    Args:
        levels: pattern -> level, as ``{"embedding.*": 0.001, "*.norm.*": None}``: ``*`` stands for
            any text, ``?`` for a character. The first pattern that fits a name decides. None sends
            uncompressed.
        default: level of parameters that no pattern fits.

    Raises:
        ValueError: no levels, an invalid one; before the first step, a pattern that fits no
            compressed parameter.

    Example:
        >>> from lightning_gc.controllers import Observation, Plan
        >>> sizes = {"embedding.weight": 500_000, "lstm.weight": 80_000}
        >>> plan = Plan({"embedding.*": 0.001}, default=0.01)
        >>> decision, _ = plan.decide(Observation(-1, sizes=sizes), {})
        >>> decision.level, decision.levels
        (0.01, {'embedding.weight': 0.001})
    """

    levels: Mapping[str, Level] | tuple[tuple[str, Level], ...]
    default: Level = None

    def __post_init__(self) -> None:
        pairs = tuple(dict(self.levels).items())
        object.__setattr__(self, "levels", pairs)  # which can be hashed
        if not pairs:
            refuse("Plan", "at least one is needed, as {'embedding.*': 0.001}", levels={})
        super().__post_init__()

    def known_levels(self) -> tuple[Level, ...]:
        return self.default, *dict(self.levels).values()

    def init(self) -> State:
        return {}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        names = list(observation.sizes)
        for pattern, _ in dict(self.levels).items():
            if names and not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, 3, 0.0)
                raise ValueError(
                    f"Plan: {pattern!r} fits none of the compressed parameters; did you mean one "
                    f"of {', '.join(near)}? Small and 1-D tensors are sent uncompressed anyway."
                )
        chosen = {name: self.of(name) for name in names}
        levels = {name: level for name, level in chosen.items() if level != self.default}
        reason = f"As planned, {len(levels)} of {len(names)} parameters have another level."
        return Decision(self.default, levels, reason), state

    def of(self, name: str) -> Level:
        """Return the level of a parameter of this name."""
        pairs = dict(self.levels).items()
        return next((level for pattern, level in pairs if fnmatchcase(name, pattern)), self.default)
