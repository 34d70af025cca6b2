"""Alpha-beta model of a link (seconds = latency + bytes / rate), its probe and its fit.

The fitted rate counts only payloads, about 4 % below an Ethernet link's nominal rate, as frames
have headers. On the host it includes Gloo's copies and sums.
"""

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
from lightning_gc.core import Exchange, Gather, Mean, Request
from lightning_gc.transports.distributed import Distributed


class HasSeconds(Protocol):
    """A link for all kinds of requests, or one for each kind."""

    def of(self, kind: str) -> Link:
        """Return the link for requests of this kind."""


@dataclass(frozen=True)
class Link:
    """A worker's link, equal in both directions; the network behind the links is not a bottleneck.

    Attributes:
        gbps: 10⁹ bits per second.
        latency_us: of one message, in microseconds.
        knee_bytes: bytes of a request that pass at once, into buffers; only further bytes take
            time.
    """

    gbps: float
    latency_us: float
    knee_bytes: float = 0.0

    def __str__(self) -> str:
        """Return the rate as plots show it."""
        return f"{self.gbps:g} Gbit/s" if self.gbps >= 1 else f"{1000 * self.gbps:g} Mbit/s"

    def of(self, kind: str) -> Link:
        """Return this link, which is the same for all kinds of requests."""
        return self

    def seconds(self, messages: float, nbytes: float) -> float:
        """Return the seconds of ``messages`` messages with ``nbytes`` bytes in total."""
        slow = max(nbytes - self.knee_bytes, 0.0)
        return messages * self.latency_us * 1e-6 + 8 * slow / (self.gbps * 1e9)


@dataclass(frozen=True)
class LinkByKind:
    """One link, fitted for each kind of request: an all-reduce also sums the arriving data.

    Attributes:
        mean: for ``Mean``, an all-reduce.
        gather: for ``Gather``, an all-gather.
        exchange: for ``Exchange``, an all-to-all.
    """

    mean: Link
    gather: Link
    exchange: Link

    def of(self, kind: str) -> Link:
        """Return the link for requests of this kind."""
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


SIZES = tuple(1 << power for power in (3, 12, 16, 18, 19, 20, 21, 22, 23, 24))
"""Payload sizes in bytes, tried in this order."""
REPEATS = (2, 5)
"""Minimum and maximum number of measured requests per size."""
LONGEST, PATIENCE = 0.2, 0.6
"""Seconds of one request after which no larger one is tried; seconds spent on one size."""
FEWEST = 5
"""Sizes that are always tried: the last one, 512 KiB, exceeds the buffers of a traffic shaper."""
KINDS = ("Mean", "Gather", "Exchange")
NOMINAL = 0.96
"""Share of a link's nominal rate for payloads; the rest are headers of Ethernet and TCP."""


@dataclass(frozen=True)
class Probe:
    """Seconds of one kind of request at one size.

    Attributes:
        messages: messages of one worker.
        nbytes: bytes of one worker.
        seconds: of the slowest worker; the minimum over repetitions, since other load only adds.
    """

    messages: float
    nbytes: float
    seconds: float


def probe(
    transport: Distributed, device: torch.device, kinds: Sequence[str] = KINDS
) -> dict[str, list[Probe]]:
    """Time these kinds of requests; return the probes by kind, equal on all workers.

    Communication pattern:
        Three to six requests of each kind and size. Before and after each request, an all-gather
        of one number: the seconds that the request took each worker.
    """
    return {kind: list(_of_kind(kind, transport, device)) for kind in kinds}


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
    """Return the seconds of the slowest worker, equal on all workers."""
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
    """Fit ``seconds = α·messages + 8·max(bytes − knee, 0)/rate`` to the probes.

    Candidates for the knee go from 0 to the bytes of the second largest probe. For each, latency
    and rate have a closed form. The least sum of squared relative errors wins.

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


def sustained(probes: Sequence[Probe]) -> float:
    """Return 10⁹ bits per second between large requests; latency and buffers cancel.

    Args:
        probes: in ascending order of size, three or more.
    """
    less, most = probes[-3], probes[-1]
    if most.seconds > less.seconds:
        return 8e-9 * (most.nbytes - less.nbytes) / (most.seconds - less.seconds)
    return 8e-9 * most.nbytes / most.seconds


def at_rate(link: HasSeconds, gbps: float) -> LinkByKind:
    """Return a link of a nominal rate with the latency measured here, and no knee.

    The knee belongs to the measured link: buffers of a loopback, or the burst of a shaper.
    """

    def one(known: Link) -> Link:
        return Link(gbps * NOMINAL, known.latency_us)

    return LinkByKind(*(one(link.of(kind)) for kind in ("Mean", "Gather", "Exchange")))
