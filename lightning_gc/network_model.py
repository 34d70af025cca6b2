"""NetworkModel: estimated seconds of communication, from counted bytes, bandwidth and latency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_gc.settings import Settings

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

    Raises:
        ValueError: a bandwidth that is not above 0, a negative latency, an unknown topology.

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

    def seconds(self, workers: int, message_bytes: float = 0, wire_bytes: float = 0) -> float:
        """Return the estimated seconds of communication of one step.

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
        return 8 * nbytes / (self.bandwidth_gbps * 1e9) + hops * self.latency_us * 1e-6
