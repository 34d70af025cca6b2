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


def messages_sent(kind: str, workers: int) -> int:
    """Return the messages that one worker sends for a request: a ring takes two rounds to sum.

    Args:
        kind: ``"Mean"``, ``"Gather"``, ``"Exchange"`` or ``"MeanShard"``.
        workers: W.
    """
    return (2 if kind == "Mean" else 1) * (workers - 1)


@dataclass(frozen=True)
class Link:
    """A worker's link, equal in both directions; the network behind the links is not a bottleneck.

    Attributes:
        gbps: 10⁹ bits per second; 0: not known.
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

    def seconds(self, messages: float, nbytes: float) -> float:
        """Return the seconds of ``messages`` messages with ``nbytes`` bytes in total."""
        slow = max(nbytes - self.knee_bytes, 0.0)
        return messages * self.latency_us * 1e-6 + 8 * slow / (self.gbps * 1e9)


Links = Mapping[str, Link]
"""Kind of a request -> the link for it, which includes what a worker does with what arrives."""


def alike(link: Link) -> Links:
    """Return a link that treats all requests alike."""
    return dict.fromkeys(KINDS, link)


def at_rate(links: Links, gbps: float) -> Links:
    """Return links of a nominal rate with the latency measured here, and no knee.

    The knee belongs to the measured link: buffers of a loopback, or the burst of a shaper.
    """
    return {
        kind: replace(link, gbps=gbps * NOMINAL, knee_bytes=0.0) for kind, link in links.items()
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
