"""Estimate the seconds of communication from counted bytes, bandwidth and latency."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_gc.controllers.base import ExchangeRecord
from lightning_gc.core.settings import Settings
from lightning_gc.transports.link import KINDS, Link, messages_sent

Topology = Literal["parameter_server", "ring", "all_gather"]


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

    Args:
        bandwidth_gbps: of a worker's link in each direction, in 10⁹ bits per second.
        latency_us: of one message, in microseconds.
        topology: which of the formulas.
        latencies_us: kind of request -> latency of its messages, if it differs from
            ``latency_us``: ``{"Gather": 80.0}``. Kinds are ``"Mean"``, ``"Gather"``,
                ``"Exchange"``.
        knee_bytes: bytes of a request that pass at once; only further bytes take time.
        schedule: pairs of a step and the bandwidth from it on, in ascending order of steps, for
            controllers that follow a link; before the first, ``bandwidth_gbps``.

    ``latencies_us``, ``knee_bytes`` and ``schedule`` affect ``request`` only: single requests as
    they are sent, a ring for means and all-gathers with any topology. ``seconds``, which the
    monitor uses, always takes ``bandwidth_gbps``.

    Raises:
        ValueError: a bandwidth that is not above 0, a negative latency or knee, an unknown topology
            or kind, a schedule that goes back.

    Example:
        >>> from lightning_gc import NetworkModel
        >>> dense = 4 * 4_444_800  # bytes of a gradient, 17.8 MB, among 4 workers at 10 Gb/s
        >>> round(NetworkModel().seconds(4, message_bytes=dense), 4)
        0.0284
        >>> ring = NetworkModel(latency_us=50, topology="ring")
        >>> round(ring.seconds(4, wire_bytes=2 * 3 * dense // 4), 4)
        0.0216

    Reference:
        The thesis that this library reproduces: a parameter server at 10 Gb/s without latency.
    """

    bandwidth_gbps: float = 10.0
    latency_us: float = 0.0
    topology: Topology = "parameter_server"
    latencies_us: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    knee_bytes: float = 0.0
    schedule: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_gbps < math.inf:
            raise ValueError(
                f"NetworkModel(bandwidth_gbps={self.bandwidth_gbps!r}): give 10⁹ bits/s, above 0."
            )
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(
                f"NetworkModel(latency_us={self.latency_us!r}): give microseconds, 0 or more."
            )
        if self.topology not in get_args(Topology):
            known = ", ".join(map(repr, get_args(Topology)))
            raise ValueError(f"NetworkModel(topology={self.topology!r}): use one of {known}.")
        object.__setattr__(self, "latencies_us", tuple(dict(self.latencies_us).items()))  # hashable
        object.__setattr__(self, "schedule", tuple((s, b) for s, b in self.schedule))
        if not 0 <= self.knee_bytes < math.inf:
            raise ValueError(f"NetworkModel(knee_bytes={self.knee_bytes!r}): give 0 or more.")
        for kind, latency in dict(self.latencies_us).items():
            if kind not in KINDS or not 0 <= latency < math.inf:
                raise ValueError(
                    f"NetworkModel(latencies_us={{{kind!r}: {latency!r}}}): kinds are "
                    f"{', '.join(KINDS)}, and a latency is 0 microseconds or more."
                )
        steps = [step for step, _ in self.schedule]
        if steps != sorted(set(steps)) or not all(0 < b < math.inf for _, b in self.schedule):
            raise ValueError(
                f"NetworkModel(schedule={self.schedule!r}): give pairs of a step and 10⁹ bits/s "
                f"above 0, in ascending order of steps."
            )

    def bandwidth_at(self, step: int) -> float:
        """Return the bandwidth in a step, in 10⁹ bits per second."""
        reached = [bandwidth for first, bandwidth in self.schedule if first <= step]
        return reached[-1] if reached else self.bandwidth_gbps

    def request(self, kind: str, nbytes: float, workers: int, step: int = 0) -> ExchangeRecord:
        """Return one request of a worker: ``α·messages + 8·max(bytes − knee, 0)/B`` seconds.

        Args:
            kind: ``"Mean"``, ``"Gather"`` or ``"Exchange"``.
            nbytes: that the worker sends in all.
            workers: W.
            step: in which, by the schedule.
        """
        messages = messages_sent(kind, workers)
        latency = dict(self.latencies_us).get(kind, self.latency_us)
        link = Link(self.bandwidth_at(step), latency, self.knee_bytes)
        return ExchangeRecord(messages, nbytes, link.seconds(messages, nbytes if messages else 0.0))

    def seconds(self, workers: int, message_bytes: float = 0, wire_bytes: float = 0) -> float:
        """Return the estimated seconds of communication of one step, at ``bandwidth_gbps``.

        Args:
            workers: ``W``.
            message_bytes: ``M``, bytes of one worker's message, counted once.
            wire_bytes: ``S``, bytes that it sends for that on a ring; only for ``"ring"``.
        """
        if workers == 1:
            return 0.0
        nbytes, hops = {
            "parameter_server": (2 * message_bytes, 2),
            "ring": (wire_bytes, 2 * (workers - 1)),
            "all_gather": ((workers - 1) * message_bytes, workers - 1),
        }[self.topology]
        return Link(self.bandwidth_gbps, self.latency_us).seconds(hops, nbytes)


def rate(text: str, whose: str) -> float:
    """Return 10⁹ bits per second of ``"1gbit"`` or ``"100mbit"``.

    Args:
        text: as written.
        whose: what it was written for, for the error message.

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
        f"{whose}{text!r} is not a rate{meant}. Write it as 1gbit, 2.5gbit or 100mbit."
    )
