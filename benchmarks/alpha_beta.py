"""The alpha-beta model: a message of m bytes takes a latency and m over the speed of the link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traces import Asked, Trace, volume


@dataclass(frozen=True)
class Link:
    """Every worker's own, the same in both directions; the network between them is no bottleneck.

    Attributes:
        gbps: 10⁹ bits per second.
        latency_us: of one message, in microseconds.
    """

    gbps: float
    latency_us: float

    def __str__(self) -> str:
        """As a plot shows it."""
        return f"{self.gbps:g} Gbit/s" if self.gbps >= 1 else f"{1000 * self.gbps:g} Mbit/s"

    def seconds(self, messages: float, nbytes: float) -> float:
        """Return what it takes to send so many messages, of so many bytes in all."""
        return messages * self.latency_us * 1e-6 + 8 * nbytes / (self.gbps * 1e9)


def communication(trace: Trace, link: Link) -> float:
    """Return the seconds that a step's requests take."""
    return sum(link.seconds(*volume(asked, trace.workers)) for asked in trace.asked)


def exchange(trace: Trace, link: Link) -> float:
    """Return the seconds of a step's exchange: computation and requests, nothing overlapped."""
    return sum(trace.seconds) + communication(trace, link)


def dense(nbytes: int, workers: int, link: Link) -> float:
    """Return the seconds of a dense ring all-reduce, which computes nothing."""
    return link.seconds(*volume(Asked("Mean", nbytes), workers))


def last_that_pays(pays: Callable[[int], bool], most: int) -> int:
    """Return the largest W up to ``most`` at which it does, 0 where it never does."""
    return next((workers for workers in range(most, 1, -1) if pays(workers)), 0)
