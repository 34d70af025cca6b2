"""The alpha-beta model: a message of m bytes takes a latency and m over the speed of the link."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_gc.advice.traces import Asked, Trace, volume
from lightning_gc.core.flow import Exchange, Gather, Mean, Request
from lightning_gc.transports.distributed import Distributed


class HasSeconds(Protocol):
    """What tells the seconds of a request: a link for all kinds, or one for each."""

    def of(self, kind: str) -> Link:
        """Return the link as requests of this kind find it."""


@dataclass(frozen=True)
class Link:
    """Every worker's own, the same in both directions; the network between them is no bottleneck.

    Attributes:
        gbps: 10⁹ bits per second.
        latency_us: of one message, in microseconds.
        knee_bytes: so many bytes of a request pass at once, into buffers; only those beyond take
            time.
    """

    gbps: float
    latency_us: float
    knee_bytes: float = 0.0

    def __str__(self) -> str:
        """As a plot shows it."""
        return f"{self.gbps:g} Gbit/s" if self.gbps >= 1 else f"{1000 * self.gbps:g} Mbit/s"

    def of(self, kind: str) -> Link:
        """Return this link, which is the same for all kinds of requests."""
        return self

    def seconds(self, messages: float, nbytes: float) -> float:
        """Return what it takes to send so many messages, of so many bytes in all."""
        slow = max(nbytes - self.knee_bytes, 0.0)
        return messages * self.latency_us * 1e-6 + 8 * slow / (self.gbps * 1e9)


@dataclass(frozen=True)
class LinkByKind:
    """One link as each kind of request finds it: an all-reduce also adds up what arrives.

    Attributes:
        mean: for ``Mean``, an all-reduce.
        gather: for ``Gather``, an all-gather.
        exchange: for ``Exchange``, an all-to-all.
    """

    mean: Link
    gather: Link
    exchange: Link

    def of(self, kind: str) -> Link:
        """Return the link as requests of this kind find it."""
        return {"Mean": self.mean, "Gather": self.gather, "Exchange": self.exchange}[kind]


def request_seconds(asked: Asked, workers: int, link: HasSeconds) -> float:
    """Return the seconds of one request."""
    return link.of(asked.kind).seconds(*volume(asked, workers))


def communication(trace: Trace, link: HasSeconds) -> float:
    """Return the seconds that a step's requests take."""
    return sum(request_seconds(asked, trace.workers, link) for asked in trace.asked)


def exchange(trace: Trace, link: HasSeconds) -> float:
    """Return the seconds of a step's exchange: computation and requests, nothing overlapped."""
    return sum(trace.seconds) + communication(trace, link)


def dense(nbytes: int, workers: int, link: HasSeconds) -> float:
    """Return the seconds of a dense ring all-reduce, which computes nothing."""
    return request_seconds(Asked("Mean", nbytes), workers, link)


def last_that_pays(pays: Callable[[int], bool], most: int) -> int:
    """Return the largest W up to ``most`` at which it does, 0 where it never does."""
    return next((workers for workers in range(most, 1, -1) if pays(workers)), 0)


SIZES = tuple(1 << power for power in (3, 12, 16, 18, 19, 20, 21, 22, 23, 24))
"""Bytes of payloads that are tried, while the time lasts."""
REPEATS = (2, 5)
"""Least and most measured requests of a size."""
LONGEST, PATIENCE = 0.2, 0.6
"""Seconds of a request after which no larger one is tried, and of a size, after which no more."""
FEWEST = 5
"""Sizes that are tried however long they take: the last is 512 KiB, beyond buffers of a shaper."""
KINDS = ("Mean", "Gather", "Exchange")
NOMINAL = 0.96
"""Share of a link's nominal rate that is left for payloads, with Ethernet's and TCP's headers."""


@dataclass(frozen=True)
class Probe:
    """Seconds of one kind of request at one size.

    Attributes:
        messages: that one worker sends.
        nbytes: that it sends in all.
        seconds: of the slowest worker; the least of all repetitions, as other load only adds.
    """

    messages: float
    nbytes: float
    seconds: float


def probe(transport: Distributed, device: torch.device) -> dict[str, list[Probe]]:
    """Time every kind of request, alike on all workers; return the probes by kind.

    Communication pattern:
        Three to six requests of each kind and size; before and after each an all-gather of one
        number, in which workers tell each other how long the request took them.
    """
    return {kind: list(_of_kind(kind, transport, device)) for kind in KINDS}


def _of_kind(kind: str, transport: Distributed, device: torch.device) -> Iterator[Probe]:
    workers = transport.workers
    for tried, size in enumerate(SIZES):
        payload = torch.zeros(max(size, 8) // 4, dtype=torch.float32, device=device)
        asked = Asked(kind, payload.numel() * 4)
        # The first of a size grows buffers and TCP's window. All workers know the same seconds.
        seconds: list[float] = []
        while len(seconds) <= REPEATS[0] or (
            sum(seconds) < PATIENCE and len(seconds) <= REPEATS[1]
        ):
            request = _request(kind, payload, workers)
            seconds.append(_timed(partial(transport.fulfil, request), transport, device))
        least = min(seconds[1:])
        yield Probe(*volume(asked, workers), least)
        if least > LONGEST and tried >= FEWEST - 1:
            return


def _request(kind: str, payload: Tensor, workers: int) -> Request:
    if kind == "Mean":
        return Mean((payload,))
    return Gather((payload,)) if kind == "Gather" else Exchange(((payload,),) * workers)


def _timed(action: Callable[[], object], transport: Distributed, device: torch.device) -> float:
    """Return the seconds that the slowest worker took, the same on all."""
    _agree(0.0, transport, device)  # all begin together
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return max(_agree(time.perf_counter() - began, transport, device))


def _agree(value: float, transport: Distributed, device: torch.device) -> list[float]:
    own = torch.tensor([value], dtype=torch.float64, device=device)
    return [float(payload[0]) for payload in transport.fulfil(Gather((own,)))]


def fit(probes: Sequence[Probe]) -> Link:
    """Return the link whose ``α·messages + 8·max(bytes − knee, 0)/rate`` is nearest to the probes.

    For each candidate of the knee, from no bytes up to those of the last probe but one, latency and
    rate have a closed form; of all the least sum of squared relative errors counts.

    Args:
        probes: in ascending order of size, two or more.
    """
    largest = max(probe.nbytes for probe in probes[:-1])
    candidates = [0.0]
    while candidates[-1] < largest:
        candidates.append(max(candidates[-1] * 2**0.125, 1024.0))
    best: tuple[float, float, float, float] | None = None
    for knee in candidates:
        alpha, beta, error = _solve(probes, knee)
        if alpha > 0 and beta > 0 and (best is None or error < best[0] * (1 - 1e-6) - 1e-12):
            best = (error, alpha, beta, knee)
    if best is None:  # as quick with large requests as with small ones: its rate is not known
        first, last = probes[0], probes[-1]
        best = (0.0, first.seconds / first.messages, last.seconds / last.nbytes, 0.0)
    _, alpha, beta, knee = best
    return Link(8 / beta / 1e9, alpha * 1e6, knee)


def _solve(probes: Sequence[Probe], knee: float) -> tuple[float, float, float]:
    """Return α in seconds, β in seconds per byte, and the sum of squared relative errors."""
    rows = [(p.messages / p.seconds, max(p.nbytes - knee, 0.0) / p.seconds) for p in probes]
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:
        return 0.0, 0.0, math.inf
    alpha, beta = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    return alpha, beta, sum((alpha * m + beta * b - 1) ** 2 for m, b in rows)


def fit_all(probes: dict[str, list[Probe]]) -> LinkByKind:
    """Return the fitted link of each kind of request."""
    mean, gather, exchange = (fit(probes[kind]) for kind in KINDS)
    return LinkByKind(mean, gather, exchange)


def off_by(probes: Sequence[Probe], link: Link) -> float:
    """Return the largest relative error of the fit."""
    return max(abs(link.seconds(p.messages, p.nbytes) / p.seconds - 1) for p in probes)


def at_rate(link: HasSeconds, gbps: float) -> LinkByKind:
    """Return what is known of another link: its nominal rate, with the latency measured here.

    What passes at once belongs to this link, be it buffers of a loopback or a shaper's burst.
    """

    def one(known: Link) -> Link:
        return Link(gbps * NOMINAL, known.latency_us)

    return LinkByKind(*(one(link.of(kind)) for kind in ("Mean", "Gather", "Exchange")))
