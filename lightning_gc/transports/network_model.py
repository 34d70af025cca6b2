"""Estimate the seconds of communication from counted bytes, bandwidth and latency."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gc.controllers.base import ExchangeRecord
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import Settings
from lightning_gc.transports.link import KINDS, Link, Rate, messages_sent

_USUAL = 10.0


@dataclass(frozen=True)
class NetworkModel(Settings):
    """Estimates the seconds that the bytes of a step take on a network of a given speed.

    With ``B = bandwidth_gbps · 10⁹`` bits per second, latency ``t``, ``W`` workers, and of one
    worker and step, on average over workers, ``M`` message bytes and ``S`` wire bytes:

    - ``"parameter_server"``: ``2·8·M/B + 2·t``. Every worker sends its message, by a link of its
      own, to a server that is never the bottleneck, and gets one of the same size back.
    - ``"ring"``: ``8·S/B + 2·(W − 1)·t``: a ring all-reduce or all-gather.
    - ``"all_gather"``: ``(W − 1)·8·M/B + (W − 1)·t``: a message to each of the others.

    One worker sends nothing: 0 seconds. A step is one request. Communication does not overlap with
    computation, and links are not shared.

    If a link is slower in one direction, a message to the server and the one back each take their
    own rate. In a ring or an all-gather every worker sends as much as it receives, both at the same
    time. Then ``B`` is the slower direction's.

    Args:
        bandwidth_gbps: of a worker's link in each direction, in 10⁹ bits per second.
        latency_us: of one message, in microseconds.
        topology: which of the formulas.
        latencies_us: kind of request -> latency of its messages, if it differs from
            ``latency_us``: ``{"Gather": 80.0}``. Kinds are ``"Mean"``, ``"Gather"``,
                ``"Exchange"``.
        knee_bytes: bytes of a request that pass at once; only further bytes take time.
        schedule: pairs of a step and the bandwidth from it on, in ascending order of steps, for
            controllers that follow a link; before the first, ``bandwidth_gbps``. A pair of rates,
            up and down, may stand for a bandwidth.
        up_gbps: of what a worker sends, in place of ``bandwidth_gbps``; only with ``down_gbps``.
        down_gbps: of what it receives.

    ``latencies_us``, ``knee_bytes`` and ``schedule`` affect ``request`` only: single requests as
    they are sent, a ring for means and all-gathers with any topology. ``seconds``, which the
    monitor uses, always takes the link's first rates.

    Raises:
        ValueError: a bandwidth that is not above 0, one direction without the other, a negative
            latency or knee, an unknown topology or kind, a schedule that goes back.

    Example:
        >>> from lightning_gc import NetworkModel
        >>> dense = 4 * 4_444_800  # bytes of a gradient, 17.8 MB, among 4 workers at 10 Gb/s
        >>> round(NetworkModel().seconds(4, message_bytes=dense), 4)
        0.0284
        >>> ring = NetworkModel(latency_us=50, topology="ring")
        >>> round(ring.seconds(4, wire_bytes=2 * 3 * dense // 4), 4)
        0.0216
        >>> home = NetworkModel(up_gbps=0.02, down_gbps=0.2, topology="ring")
        >>> home.seconds(4, wire_bytes=500_000)  # the slower direction's
        0.2

    Reference:
        The thesis that this library reproduces: a parameter server at 10 Gb/s without latency.
    """

    bandwidth_gbps: float = _USUAL
    latency_us: float = 0.0
    topology: Literal["parameter_server", "ring", "all_gather"] = "parameter_server"
    latencies_us: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    knee_bytes: float = 0.0
    schedule: tuple[tuple[int, float | Rate], ...] = ()
    up_gbps: float | None = None
    down_gbps: float | None = None
    limits = {
        "bandwidth_gbps": "(0, inf) the rate in 10⁹ bits/s; 0.1",
        "up_gbps": "(0, inf) the rate in 10⁹ bits/s; 0.1",
        "down_gbps": "(0, inf) the rate in 10⁹ bits/s; 0.1",
        "latency_us": "[0, inf) the microseconds",
        "knee_bytes": "[0, inf) the number of bytes",
    }

    def __post_init__(self) -> None:
        up, down, usual = self.up_gbps, self.down_gbps, self.bandwidth_gbps
        if (up is None) != (down is None) or (up is not None and usual != _USUAL):
            refuse(
                "NetworkModel",
                "give bandwidth_gbps for both directions, or up_gbps and down_gbps, such as "
                "NetworkModel(up_gbps=0.02, down_gbps=0.2)",
                bandwidth_gbps=usual,
                up_gbps=up,
                down_gbps=down,
            )
        object.__setattr__(self, "latencies_us", tuple(dict(self.latencies_us).items()))  # hashable
        schedule = tuple(
            (s, b if isinstance(b, int | float) else tuple(b)) for s, b in self.schedule
        )
        object.__setattr__(self, "schedule", schedule)
        for kind, latency in dict(self.latencies_us).items():
            if kind not in KINDS or not 0 <= latency < math.inf:
                rule = f"kinds are {', '.join(KINDS)}, and a latency is 0 microseconds or more"
                refuse("NetworkModel", rule, latencies_us={kind: latency})
        steps = [step for step, _ in self.schedule]
        pairs = [_both(given) for _, given in self.schedule]
        valid = all(len(pair) == 2 and all(0 < rate < math.inf for rate in pair) for pair in pairs)
        if steps != sorted(set(steps)) or not valid:
            rule = "give pairs of a step and 10⁹ bits/s above 0, in ascending order of steps"
            refuse("NetworkModel", rule, schedule=self.schedule)

    @property
    def link(self) -> Link:
        """The link of a worker at first."""
        up, down = self.up_gbps or self.bandwidth_gbps, self.down_gbps or self.bandwidth_gbps
        return Link(up, self.latency_us, self.knee_bytes, down)

    def link_at(self, step: int, kind: str = "") -> Link:
        """Return the link in a step, for one kind of request."""
        latency = dict(self.latencies_us).get(kind, self.latency_us)
        link = replace(self.link, latency_us=latency)
        reached = [_both(given) for first, given in self.schedule if first <= step]
        return replace(link, gbps=reached[-1][0], down_gbps=reached[-1][1]) if reached else link

    def request(
        self,
        kind: str,
        nbytes: float,
        workers: int,
        step: int = 0,
        received: float | None = None,
    ) -> ExchangeRecord:
        """Return one request: ``α·messages + 8·max(bytes − knee, 0)/B`` seconds.

        Args:
            kind: ``"Mean"``, ``"Gather"`` or ``"Exchange"``.
            nbytes: that the worker sends in all which sends most.
            workers: W.
            step: in which, by the schedule.
            received: that the worker receives which receives most; None: as many.
        """
        messages, link = messages_sent(kind, workers), self.link_at(step, kind)
        seconds = link.seconds(messages, nbytes, received) if messages else 0.0
        return ExchangeRecord(messages, nbytes, seconds)

    def seconds(self, workers: int, message_bytes: float = 0, wire_bytes: float = 0) -> float:
        """Return the estimated seconds of communication of one step.

        Args:
            workers: ``W``.
            message_bytes: ``M``, bytes of one worker's message, counted once.
            wire_bytes: ``S``, bytes that it sends for that on a ring; only for ``"ring"``.
        """
        link, others = replace(self.link, knee_bytes=0.0), workers - 1
        if not others:
            return 0.0
        if self.topology == "parameter_server":
            return link.seconds(1, message_bytes, 0.0) + link.seconds(1, 0.0, message_bytes)
        if self.topology == "ring":
            return link.seconds(2 * others, wire_bytes)
        return link.seconds(others, others * message_bytes)


def _both(given: float | Rate) -> Rate:
    return (given, given) if isinstance(given, int | float) else given


def rates(text: str, owner: str) -> Rate:
    """Return 10⁹ bits per second up and down, of ``"1gbit"`` or ``"20mbit/200mbit"``.

    Args:
        text: as written; a single rate is for both directions.
        owner: as for ``rate``, which refuses what is none.

    Example:
        >>> rates("1gbit", "--link "), rates("20mbit/200mbit", "--link ")
        ((1.0, 1.0), (0.02, 0.2))
    """
    both = re.fullmatch(r"([^/]*)/\s*(\d.*)", text.strip())
    if both is None:
        return _both(rate(text, owner))
    return rate(both[1], owner), rate(both[2], owner)


def rate(text: str, owner: str) -> float:
    """Return 10⁹ bits per second of ``"1gbit"`` or ``"100mbit"``.

    Args:
        text: as written.
        owner: what it was written for, for the error message.

    Raises:
        ValueError: the text is not a rate.

    Example:
        >>> rate("2.5gbit", "--link "), rate("100 Mbit", "--link ")
        (2.5, 0.1)
    """
    units = {"g": 1.0, "m": 1e-3}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([gm])bit", text.strip(), re.IGNORECASE)
    if found is not None and float(found[1]) > 0:
        return float(found[1]) * units[found[2].lower()]
    near = re.match(r"\s*(\d+(?:\.\d+)?)\s*([gm])(i?b(?:yte)?s?/s|i?byte)?", text, re.IGNORECASE)
    meant = ""
    if near is not None and float(near[1]) > 0:
        in_bytes = "yte" in (near[3] or "").lower() or "B" in (near[3] or "")
        number = float(near[1]) * (8 if in_bytes else 1)
        meant = f" (did you mean {number:g}{near[2].lower()}bit?)"
    raise ValueError(
        f"{owner}{text!r} is not a rate{meant}. Write it as 1gbit, 2.5gbit or 100mbit."
    )
