"""Record bytes and seconds of a request, and fit a link to several (ExchangeRecord)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ExchangeRecord(NamedTuple):
    """One request of a worker.

    Attributes:
        messages: that it sent.
        nbytes: that it sent in all.
        seconds: that the request took. On CUDA from when its stream has reached the request until
            it has finished it. Both include waiting for a late peer; see ``Observation.exchanges``.
    """

    messages: int
    nbytes: float
    seconds: float


class FittedLink(NamedTuple):
    """Latency and rate, from exchanges.

    Attributes:
        latency_us: of a message, in microseconds.
        bandwidth_gbps: in 10⁹ bits per second; 0 if seconds do not grow with the bytes.
        r2: share of the variance of seconds that the fit explains, at most 1.
    """

    latency_us: float
    bandwidth_gbps: float
    r2: float


def fit_link(records: Sequence[ExchangeRecord]) -> FittedLink:
    """Return the least squares' fit of ``seconds = α·messages + 8·bytes/B``.

    Without negative terms. Where all requests have one size, their seconds are all the rate's:
    ``B = 8·Σ bytes / Σ seconds``, a lower bound.

    Args:
        records: in any order; none give zeros.
    """
    if not records:
        return FittedLink(0.0, 0.0, 0.0)
    mm = sum(r.messages * r.messages for r in records)
    mb = sum(r.messages * r.nbytes for r in records)
    bb = sum(r.nbytes * r.nbytes for r in records)
    ms = sum(r.messages * r.seconds for r in records)
    bs = sum(r.nbytes * r.seconds for r in records)
    determinant = mm * bb - mb * mb
    latency, rate = (ms / mm if mm else 0.0, 0.0), (0.0, bs / bb if bb else 0.0)
    found = [rate if bb else latency]
    if determinant > 1e-9 * mm * bb:
        both = (ms * bb - bs * mb) / determinant, (bs * mm - ms * mb) / determinant
        # Where one would be negative, the best fit without negative terms has the other alone.
        found = [both] if min(both) >= 0 else [rate, latency]
    left, alpha, beta = min(
        (sum((r.seconds - a * r.messages - b * r.nbytes) ** 2 for r in records), a, b)
        for a, b in found
    )
    mean = sum(r.seconds for r in records) / len(records)
    spread = sum((r.seconds - mean) ** 2 for r in records)
    r2 = 1 - left / spread if spread > 0 else 0.0  # of one request nothing is explained
    return FittedLink(alpha * 1e6, 8 / beta / 1e9 if beta > 0 else 0.0, r2)
