"""One model of a link: seconds of messages and bytes, and its fits to timed requests.

The fitted rate counts only payloads, about 4 % below an Ethernet link's nominal rate, as frames
have headers. On the host it includes Gloo's copies and sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gc.controllers.base import ExchangeRecord

KINDS = ("Mean", "Gather", "Exchange")
"""Requests that a link may treat differently: an all-reduce also sums the arriving data."""


NOMINAL = 0.96
"""Share of a link's nominal rate for payloads; the rest are headers of Ethernet and TCP."""


APART = 1.5
"""Factor by which the directions of a link must differ: less may be noise of a measurement."""

Rate = tuple[float, float]
"""Rates of sending and of receiving, in 10⁹ bits per second."""


def messages_sent(kind: str, workers: int) -> int:
    """Return the messages that one worker sends for a request: a ring takes two rounds to sum.

    Args:
        kind: ``"Mean"``, ``"Gather"``, ``"Exchange"`` or ``"MeanShard"``.
        workers: W.
    """
    return (2 if kind == "Mean" else 1) * (workers - 1)


@dataclass(frozen=True)
class Link:
    """A worker's link, which sends and receives at the same time.

    The network behind the links is not a bottleneck. Each byte that arrives has been sent by
    another worker. So in a ring all-reduce, an all-gather, or an all-to-all of equal messages the
    slower direction counts. Only an all-to-all whose messages differ may be held up by the other
    one.

    Attributes:
        gbps: of what it sends, in 10⁹ bits per second; 0: not known.
        latency_us: of one message, in microseconds.
        knee_bytes: bytes of a request that pass at once in each direction, into buffers; only
            further bytes take time.
        down_gbps: of what it receives; None: the same as of what it sends.
    """

    gbps: float
    latency_us: float
    knee_bytes: float = 0.0
    down_gbps: float | None = None

    def __str__(self) -> str:
        """Return the rates as plots show them."""
        if self.down_gbps in (None, self.gbps):
            return _written(self.gbps)
        assert self.down_gbps is not None
        return f"{_written(self.gbps)} up, {_written(self.down_gbps)} down"

    def times(self, factor: float) -> Link:
        """Return this link with so many times the rates."""
        down = None if self.down_gbps is None else factor * self.down_gbps
        return replace(self, gbps=factor * self.gbps, down_gbps=down)

    def seconds(self, messages: float, sent: float, received: float | None = None) -> float:
        """Return ``α·messages + max(8·sent/up, 8·received/down)``, bytes beyond the knee only.

        Args:
            messages: that the worker sends.
            sent: bytes that it sends in all.
            received: bytes that it receives; None: as many as it sends.
        """
        down = self.gbps if self.down_gbps is None else self.down_gbps
        both = ((sent, self.gbps), (sent if received is None else received, down))
        slow = max(8 * max(nbytes - self.knee_bytes, 0.0) / (rate * 1e9) for nbytes, rate in both)
        return messages * self.latency_us * 1e-6 + slow


def _written(gbps: float) -> str:
    return f"{gbps:g} Gbit/s" if gbps >= 1 else f"{1000 * gbps:g} Mbit/s"


Links = Mapping[str, Link]
"""Kind of a request -> the link for it, which includes what a worker does with what arrives."""


def alike(link: Link) -> Links:
    """Return the same link for all kinds of requests."""
    return dict.fromkeys(KINDS, link)


def at_rate(links: Links, nominal: Link) -> Links:
    """Return links of nominal rates with the latency measured here, and no knee.

    The knee belongs to the measured link: buffers of a loopback, or the burst of a shaper.
    """
    payload = nominal.times(NOMINAL)
    return {kind: replace(payload, latency_us=link.latency_us) for kind, link in links.items()}


def with_directions(links: Links, up: float, down: float) -> Links:
    """Return links whose faster direction is as much faster as these rates say.

    A rate that was fitted to requests with equal messages is the slower direction's. Rates that
    differ by less than ``APART`` count as equal.
    """
    if max(up, down) < APART * min(up, down):
        return links
    slower = min(up, down)
    return {
        kind: replace(link, gbps=link.gbps * up / slower, down_gbps=link.gbps * down / slower)
        for kind, link in links.items()
    }


def fit(records: Sequence[ExchangeRecord]) -> tuple[Link, float]:
    """Return the least squares' fit of ``seconds = α·messages + 8·bytes/B``, and its r².

    Without negative terms. Where all requests have one size, their seconds are all the rate's:
    ``B = 8·Σ bytes / Σ seconds``, a lower bound. If seconds do not grow with the bytes, the rate is
    0. The r² is the share of the variance of seconds that the fit explains, at most 1.

    Args:
        records: in any order; none give zeros.
    """
    if not records:
        return Link(0.0, 0.0), 0.0
    alpha, beta, left = _solve(records)
    mean = sum(each.seconds for each in records) / len(records)
    spread = sum((each.seconds - mean) ** 2 for each in records)
    r2 = 1 - left / spread if spread > 0 else 0.0  # of one request nothing is explained
    return _link(alpha, beta), r2


def fit_with_knee(probes: Sequence[ExchangeRecord]) -> Link:
    """Fit ``seconds = α·messages + 8·max(bytes − knee, 0)/rate`` to the probes.

    Candidates for the knee go from 0 to the bytes of the second largest probe. The least sum of
    squared relative errors wins.

    Args:
        probes: in ascending order of size, two or more.
    """
    largest = max(probe.nbytes for probe in probes[:-1])
    candidates = [0.0]
    while candidates[-1] < largest:
        candidates.append(max(candidates[-1] * 2**0.125, 1024.0))
    first, last = probes[0], probes[-1]
    # As quick with large requests as with small ones: its rate is not known.
    best = _link(first.seconds / first.messages, last.seconds / last.nbytes)
    least = math.inf
    for knee in candidates:
        alpha, beta, error = _solve(
            (p.messages / p.seconds, max(p.nbytes - knee, 0.0) / p.seconds, 1.0) for p in probes
        )
        if alpha > 0 and beta > 0 and error < least * (1 - 1e-6) - 1e-12:
            least, best = error, _link(alpha, beta, knee)
    return best


def _link(alpha: float, beta: float, knee: float = 0.0) -> Link:
    return Link(8 / beta / 1e9 if beta > 0 else 0.0, alpha * 1e6, knee)


def _solve(records: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return α and β, 0 or more, with the least ``Σ (s − α·m − β·b)²``, and that sum."""
    rows = list(records)
    mm, mb, bb, ms, bs = (
        sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    determinant = mm * bb - mb * mb
    latency, rate = (ms / mm if mm else 0.0, 0.0), (0.0, bs / bb if bb else 0.0)
    found = [rate if bb else latency]
    if determinant > 1e-9 * mm * bb:
        both = (ms * bb - bs * mb) / determinant, (bs * mm - ms * mb) / determinant
        # Where one would be negative, the best fit without negative terms has the other alone.
        found = [both] if min(both) >= 0 else [rate, latency]
    left, alpha, beta = min(
        (sum((s - a * m - b * n) ** 2 for m, n, s in rows), a, b) for a, b in found
    )
    return alpha, beta, left
