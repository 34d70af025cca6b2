"""Time requests between the workers, of several sizes for a fit, and in one direction each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from lightning_gc.advice.traces import Asked
from lightning_gc.controllers import ExchangeRecord
from lightning_gc.core import Exchange, Gather, Mean, Request
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.link import KINDS, Rate

SIZES = tuple(1 << power for power in (3, 12, 16, 18, 19, 20, 21, 22, 23, 24))
"""Payload sizes in bytes, tried in this order."""
REPEATS = (2, 5)
"""Minimum and maximum number of measured requests per size."""
LONGEST, PATIENCE = 0.2, 0.6
"""Seconds of one request after which no larger one is tried; seconds spent on one size."""
FEWEST = 5
"""Sizes that are always tried: the last one, 512 KiB, exceeds the buffers of a traffic shaper."""


def probe(
    transport: Distributed, device: torch.device, kinds: Sequence[str] = KINDS
) -> dict[str, list[ExchangeRecord]]:
    """Time these kinds of requests; return the slowest worker's by kind, on all workers.

    Communication pattern:
        Three to six requests of each kind and size. Before and after each request, an all-gather
        of one number: the seconds that the request took each worker.
    """
    return {kind: list(_of_kind(kind, transport, device)) for kind in kinds}


def _of_kind(kind: str, transport: Distributed, device: torch.device) -> Iterator[ExchangeRecord]:
    workers = transport.workers
    for tried, size in enumerate(SIZES):
        payload = torch.zeros(max(size, 8) // 4, dtype=torch.float32, device=device)
        requests: dict[str, Request] = {
            "Mean": Mean((payload,)),
            "Gather": Gather((payload,)),
            "Exchange": Exchange(((payload,),) * workers),
        }
        asked = Asked(kind, payload.numel() * 4)
        # The first of a size grows buffers and TCP's window. All workers know the same seconds.
        seconds: list[float] = []
        while len(seconds) <= REPEATS[0] or (
            sum(seconds) < PATIENCE and len(seconds) <= REPEATS[1]
        ):
            seconds.append(_timed(partial(transport.fulfil, requests[kind]), transport, device))
        least = min(seconds[1:])  # other load only adds
        messages, nbytes, _ = asked.volume(workers)
        yield ExchangeRecord(messages, nbytes, least)
        if least > LONGEST and tried >= FEWEST - 1:
            return


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


WHILE = 0.1
"""Seconds that a probe of one direction is to take."""
LEAST, MOST = 1 << 17, 1 << 23
"""Bytes of its messages: at least what a traffic shaper lets pass at once, and at most."""
MANY = 8
"""Workers whose directions are measured, at most."""


def directions(transport: Distributed, device: torch.device, gbps: float) -> list[Rate]:
    """Return the rates up and down of each worker, the first ``MANY``, equal on all workers.

    A worker sends to all others at once, then all others to it. Among equal links the faster rate
    found is at most W − 1 times the slower one, because nobody can send more. No request between
    these workers can use more either. Of two workers one's rate up is the other's rate down.

    Args:
        transport: to the others.
        device: one that it can send from.
        gbps: of the slower direction, roughly.

    Communication pattern:
        Five all-to-alls for each worker and direction, in which only that worker sends, or
        receives. Before and after each an all-gather of one number.
    """
    workers = transport.workers
    size = int(min(max(gbps * 1e9 / 8 * WHILE / (workers - 1), LEAST), MOST))
    each = range(min(workers, MANY))
    up = [_one_way([one], size, transport, device) for one in each]
    if workers == 2:
        return [(up[0], up[1]), (up[1], up[0])]
    others = [[worker for worker in range(workers) if worker != one] for one in each]
    return list(zip(up, (_one_way(all_, size, transport, device) for all_ in others), strict=True))


def _one_way(
    senders: Sequence[int], size: int, transport: Distributed, device: torch.device
) -> float:
    """Return 10⁹ bits per second that these workers send to all that are none of them, at once."""
    sends, took = transport.worker in senders, []
    for times, numel in ((3, size), (2, 2 * size)):
        payload = torch.zeros(numel, dtype=torch.uint8, device=device)
        to_each = tuple(
            (payload if sends and worker not in senders else payload[:0],)
            for worker in range(transport.workers)
        )
        send = partial(transport.fulfil, Exchange(to_each, (2 * size,)))
        seconds = [_timed(send, transport, device) for _ in range(times)]
        took.append(min(seconds[-2:]))  # the very first fills what a shaper lets pass at once
    less, most = took
    nbytes = size * len(senders) * (transport.workers - len(senders))
    return 8e-9 * (nbytes / (most - less) if most > less else 2 * nbytes / most)


def sustained(probes: Sequence[ExchangeRecord]) -> float:
    """Return 10⁹ bits per second between large requests; latency and buffers cancel.

    Args:
        probes: in ascending order of size, three or more.
    """
    less, most = probes[-3], probes[-1]
    if most.seconds > less.seconds:
        return 8e-9 * (most.nbytes - less.nbytes) / (most.seconds - less.seconds)
    return 8e-9 * most.nbytes / most.seconds
