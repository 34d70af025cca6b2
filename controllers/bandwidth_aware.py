"""Compress as little as a given time per step allows on the present link (BandwidthAware)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, KnobLike, Level, Needs, Observation, State, compresses_less


@dataclass(frozen=True)
class BandwidthAware(Controller):
    """Choose the level so that a step takes ``step_seconds`` while the link's speed changes.

    Every ``every`` steps, with ``T`` the mean seconds of a step since the last decision, ``S`` its
    bytes and ``B`` the rate found for the link, a step may send ``c = S + (step_seconds − T)·B/8``
    bytes: its present bytes, and the bytes that the link can send in the remaining time. This holds
    for any overlap with the backward pass. The level is the one that compresses least with
    ``S(level) ≤ c``. The bytes of a level were measured when it was last in force; before that they
    are taken in proportion to the level. A level that sends more is taken only if it needs at most
    ``headroom·c``.

    The rate is the fitted one if the fit is good, else bytes over seconds of the latest half of the
    requests, which is too low for small messages and so errs towards compression.

    Seconds differ between two runs, and so do levels: a run resumes as it was, but is not repeated
    bit for bit. ``trace`` writes down what was seen and decided; ``replay`` repeats that.

    Args:
        levels: to choose from, from least compression to most, as ``(0.1, 0.03, 0.01)``.
        step_seconds: that a step shall take; more sends more.
        first: of ``levels``, until the first step is known; None is the last, which sends least.
        every: steps between decisions, each of an all-reduce of a few numbers and a broadcast; and
            whenever the number of steps has doubled, early in the run.
        headroom: in (0, 1]; less makes it slower to raise the level.
        trace: path of a file; empty for none.

    Raises:
        ValueError: settings out of range, levels in another order, a knob other than density,
            number of bits or rank.

    Example:
        >>> from lightning_gc.controllers import BandwidthAware, Observation
        >>> aware = BandwidthAware((0.1, 0.01), step_seconds=0.2)
        >>> slow = Observation(0, steps=10, wire_bytes=1e7, step_seconds=0.5, bandwidth_gbps=0.02)
        >>> state = {"level": 0, "bytes": {}}
        >>> aware.decide(slow, state)[0].level
        0.01

    Reference:
        After Xin, Ilin, Zhang, Canini and Richtárik, "Kimad: Adaptive Gradient Compression with
        Bandwidth Awareness", 2023. Our reading; the correction by the step's measured seconds is
        ours.
    """

    levels: tuple[float, ...]
    step_seconds: float
    first: float | None = None
    every: int = 16
    headroom: float = 0.9
    trace: str = ""
    limits = {
        "step_seconds": "(0, inf) the number of seconds",
        "every": "[1, inf) the number of steps",
        "headroom": "(0, 1] the share",
    }

    def __post_init__(self) -> None:
        check_ladder("BandwidthAware", self.levels)
        if self.first is not None and self.first not in self.levels:
            refuse("BandwidthAware", f"one of {self.levels!r}", first=self.first)

    @property
    def needs(self) -> Needs:
        return Needs(seconds=True, link=True, trace=self.trace)

    def every_steps(self, epoch: int) -> int:
        return self.every

    def known_levels(self) -> tuple[Level, ...]:
        return self.levels

    def check(self, knob: KnobLike | None) -> None:
        super().check(knob)
        assert knob is not None
        check_order(self, self.levels, knob)

    def init(self) -> State:
        first = self.levels[-1] if self.first is None else self.first
        return {"level": self.levels.index(first), "bytes": {}}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        at, known = state["level"], dict(state["bytes"])
        took, steps = observation.step_seconds, observation.steps
        gbps = rate_of(observation)
        if not steps or not took > 0 or not gbps > 0:
            reason = "No seconds of steps or requests are known, so the level stays."
            return Decision(self.levels[at], reason=reason), state
        sent = observation.wire_bytes / steps
        known[str(at)] = sent
        allowed = max(sent + (self.step_seconds - took) * gbps * 1e9 / 8, 0.0)
        guess = [
            known.get(str(i), sent * level / self.levels[at]) for i, level in enumerate(self.levels)
        ]
        fits = [
            i
            for i, nbytes in enumerate(guess)
            if nbytes <= (allowed if i >= at else self.headroom * allowed)
        ]
        new = fits[0] if fits else len(self.levels) - 1
        figures = {"link_gbps": gbps, "bytes_allowed": allowed, "observed_step_seconds": took}
        reason = (
            f"A step took {took:.4g} s of {self.step_seconds:.4g} s at {gbps:.3g} Gbit/s, so that "
            f"{allowed:,.0f} bytes are allowed."
        )
        return Decision(self.levels[new], {}, reason, figures), {"level": new, "bytes": known}


GOOD = 0.9
"""Least r² of a fit that is believed."""


def rate_of(observation: Observation) -> float:
    """Return the rate of the link in 10⁹ bits per second; 0 if it is not known."""
    if observation.bandwidth_gbps > 0 and observation.link_r2 >= GOOD:
        return observation.bandwidth_gbps
    latest = observation.exchanges[-max(len(observation.exchanges) // 2, 1) :]
    seconds = sum(each.seconds for each in latest)
    if seconds > 0:
        return 8 * sum(each.nbytes for each in latest) / seconds / 1e9
    return observation.bandwidth_gbps


def check_ladder(owner: str, levels: tuple[float, ...]) -> None:
    """Raise ValueError for fewer than two levels, or invalid ones."""
    if len(set(levels)) < 2 or len(set(levels)) < len(levels):
        refuse(owner, "two or more levels, each once", levels=levels)
    if not all(0 < level < math.inf for level in levels):
        refuse(owner, "levels are finite numbers above 0", levels=levels)


def check_order(owner: Controller, levels: tuple[float, ...], knob: KnobLike) -> None:
    """Raise ValueError for levels that do not go from least compression to most."""
    harder = not all(compresses_less(*pair, knob) for pair in itertools.pairwise(levels))
    descending = sorted(levels)[::-1]
    given = {"controller": owner, "knob": knob, "descending": descending}
    judge(type(owner).__name__, **given, harder=harder)
