"""DDP's gradient buckets: which gradients share one, and how large buckets are on a GPU.

Pure arithmetic on sizes, so all workers of one model get the same buckets.
"""

import itertools
from collections.abc import Iterable, Sequence

from lightning_gc.exchange.timeline import BucketWork, Module, timeline

Layout = tuple[range, ...]
"""Positions of parameters in each bucket, in the order of readiness."""

MIB = 1 << 20
DEFAULT_CAPS = (MIB, 25 * MIB)
"""DDP's defaults: the first bucket is small, so that the exchange begins early."""


def caps(bucket_cap_mb: float | None) -> tuple[int, ...]:
    """Return DDP's limits in bytes for its argument; None is DDP's default."""
    return DEFAULT_CAPS if bucket_cap_mb is None else (int(bucket_cap_mb * MIB),)


def layout(nbytes: Sequence[int], limits: Sequence[int]) -> Layout:
    """Return the buckets that DDP makes after its first step.

    Gradients are added to a bucket until it reaches its limit, so the last one may exceed it.

    Args:
        nbytes: of each gradient, in order of readiness.
        limits: of the first bucket, the second and so on; the last one holds for all others.
    """
    buckets: list[range] = []
    start = size = 0
    for position, more in enumerate(nbytes):
        size += more
        if size >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(range(start, position + 1))
            start, size = position + 1, 0
    if start < len(nbytes):
        buckets.append(range(start, len(nbytes)))
    return tuple(buckets)


def segments(nbytes: Sequence[int], layouts: Iterable[Layout], alone: float) -> Layout:
    """Return consecutive segments such that every bucket of every layout consists of some of them.

    Args:
        nbytes: as for ``layout``.
        layouts: one for each cap.
        alone: a gradient of at least this number of bytes is a segment by itself.
    """
    cuts = {0, len(nbytes)}
    for bucket in itertools.chain.from_iterable(layouts):
        cuts |= {bucket.start, bucket.stop}
    for position, size in enumerate(nbytes):
        if size >= alone:
            cuts |= {position, position + 1}
    return tuple(range(a, b) for a, b in itertools.pairwise(sorted(cuts)))


def pieces_of(bucket: range, found: Layout) -> range:
    """Return which segments make up a bucket."""
    inside = [i for i, piece in enumerate(found) if bucket.start <= piece.start < bucket.stop]
    return range(inside[0], inside[-1] + 1)


LARGER_MB = (50, 100, 200)
"""Candidates for ``bucket_cap_mb`` on CUDA, besides DDP's default."""
WRITTEN = 1.3e-3
"""Seconds of the host for a bucket with an exchange that runs as written in each step.

Measured with ``QSGD(4)`` on an H100's host. Source: docs/gpus.md, "What it costs".
"""
RECORDED = 0.6e-3 / 10 + 0.1e-3
"""Seconds of the host for a bucket with a recorded exchange: estimated, not measured on a GPU.

``Cast()`` took 0.6 ms as it is written. Recorded it calls a tenth of the functions, 53 in place of
502 (``benchmarks/launch_cost.py``). Added are about 0.1 ms for DDP's hook, stream and collective.
"""
BACKWARD = 42.7e-3 * 2 / 3 / 498e6
"""Seconds of the backward pass per byte of gradients: two thirds of a step of GPT-2.

Of the same measurement: 42.7 ms a step without synchronisation, 498 MB of gradients.
"""
PACES = (0.5, 1.0, 2.0)
"""Seconds of the exchange on the network, relative to the backward pass."""
WORTH = 0.05
"""Minimum relative gain over DDP's default; the assumptions are not more precise."""


def cap_on_cuda(nbytes: Sequence[int], host: float) -> int | None:
    """Return ``bucket_cap_mb`` for a GPU; None keeps DDP's default.

    Each bucket takes time of the host, which many models wait for on a GPU, so fewer buckets are
    better. A larger bucket is sent later, so less of the exchange overlaps with the backward pass.
    The size with the shortest predicted step is chosen, if it gains ``WORTH``.

    The step is the one of ``exchange.timeline`` under these assumptions: the forward pass takes
    half as long as the backward pass. Gradients become ready in proportion to their bytes. The
    host's work delays the backward pass by its own seconds. The network is unknown, so the seconds
    for each of ``PACES`` are added. No GPU has measured the result.

    Args:
        nbytes: of each gradient, in order of readiness.
        host: seconds of the host for one bucket, such as ``WRITTEN``.

    Example:
        >>> gpt2 = [27 * MIB] * 12 + [150 * MIB]
        >>> cap_on_cuda(gpt2, WRITTEN)
        100
        >>> cap_on_cuda(gpt2, RECORDED)
    """

    def seconds(cap: float | None) -> float:
        sizes = [sum(nbytes[i] for i in bucket) for bucket in layout(nbytes, caps(cap))]
        return sum(step_seconds(sizes, host, pace) for pace in PACES)

    best = min(LARGER_MB, key=seconds)
    return best if seconds(best) < (1 - WORTH) * seconds(None) else None


def step_seconds(sizes: Sequence[int], host: float, pace: float) -> float:
    """Return the predicted seconds of a step, without the optimizer.

    Args:
        sizes: bytes of the buckets, in order of readiness.
        host: seconds of the host for one bucket.
        pace: seconds of the exchange on the network, relative to the backward pass.
    """
    seconds = [BACKWARD * size for size in sizes]
    ready, backward = itertools.accumulate(seconds), sum(seconds)
    works = [
        BucketWork(at, (host, 0.0), (pace * own,)) for at, own in zip(ready, seconds, strict=True)
    ]
    return timeline(Module(backward / 2, backward, 0.0), works, contention=1.0).seconds
