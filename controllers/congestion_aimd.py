"""Raise the level while exchanges are quick, cut it when they are slow (AIMD)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, KnobLike, Level, Needs, Observation, State


@dataclass(frozen=True)
class CongestionAIMD(Controller):
    """Additive increase, multiplicative decrease of the level, by the seconds of an exchange.

    Every ``every`` steps, with ``T`` the mean seconds of the latest requests: the level becomes
    ``max(least, down·level)`` if ``T > seconds``, else ``min(most, level + up)``. It needs no rate
    of the link and no proportion between level and bytes. It comes down to a slower link in some
    ``log(level ratio)/log(down)`` decisions, and up to a faster one in ``(level difference)/up``;
    ``BandwidthAware`` in one, if its estimates hold.

    Seconds differ between two runs, and so do levels; see ``BandwidthAware``.

    Args:
        seconds: that a request may take; more sends more.
        first: level until the first request is known.
        up: added; more follows a faster link sooner.
        down: factor in (0, 1); less leaves a slower link sooner.
        least: smallest level.
        most: largest level.
        every: steps between decisions.
        trace: path of a file; empty for none.

    Raises:
        ValueError: settings out of range, a knob with which a higher value compresses more.

    Example:
        >>> from lightning_gc.controllers import CongestionAIMD, ExchangeRecord, Observation
        >>> control = CongestionAIMD(seconds=0.05, first=0.1)
        >>> slow = Observation(0, steps=1, exchanges=(ExchangeRecord(1, 1e6, 0.5),))
        >>> round(control.decide(slow, control.init())[0].level, 4)
        0.095

    Reference:
        After "NetSenseML: Network-Adaptive Compression for Efficient Distributed Machine Learning",
        2025: its increase and decrease. There the bytes of an exchange are compared
        with the largest rate times the least delay of a window. Where bytes pass one after the
        other, without a stretch that takes no time, that product follows the exchange itself, and
        the level drifts; so the bound is given here.
    """

    seconds: float
    first: float = 0.01
    up: float = 0.001
    down: float = 0.95
    least: float = 0.005
    most: float = 1.0
    every: int = 8
    trace: str = ""
    limits = {
        "seconds": "(0, inf) the number of seconds",
        "up": "(0, inf)",
        "down": "(0, 1) a factor",
        "every": "[1, inf) the number of steps",
    }

    def __post_init__(self) -> None:
        if not 0 < self.least < self.most < math.inf:
            why = "finite levels above 0, least below most"
            refuse("CongestionAIMD", why, least=self.least, most=self.most)
        if not self.least <= self.first <= self.most:
            why = f"within least={self.least!r} and most={self.most!r}"
            refuse("CongestionAIMD", why, first=self.first)

    @property
    def needs(self) -> Needs:
        return Needs(link=True, trace=self.trace)

    def every_steps(self, epoch: int) -> int:
        return self.every

    def known_levels(self) -> tuple[Level, ...]:
        return self.first, self.least, self.most

    def check(self, knob: KnobLike | None) -> None:
        super().check(knob)
        assert knob is not None
        judge("CongestionAIMD", controller=self, knob=knob)

    def init(self) -> State:
        return {"level": self.first}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        level, seen = state["level"], observation.exchanges
        if not seen:
            return Decision(level, reason="No request is known, so the level stays."), state
        took = sum(each.seconds for each in seen) / len(seen)
        slow = took > self.seconds
        new = max(self.least, self.down * level) if slow else min(self.most, level + self.up)
        reason = (
            f"A request took {took:.4g} s of {self.seconds:.4g} s, so the level "
            f"{'falls' if slow else 'rises'}."
        )
        return Decision(new, {}, reason, {"request_seconds": took}), {"level": new}
