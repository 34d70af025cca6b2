"""Time requests of several sizes between the workers, for the fit of their link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gc.advice.traces import Asked
from lightning_gc.controllers import ExchangeRecord
from lightning_gc.core import Exchange, Gather, Mean, Request
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.link import KINDS

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
    """Time these kinds of requests; return those of the slowest worker by kind, on all workers.

    Communication pattern:
        Three to six requests of each kind and size. Before and after each request, an all-gather
        of one number: the seconds that the request took each worker.
    """
    return {kind: list(_of_kind(kind, transport, device)) for kind in kinds}


def _of_kind(kind: str, transport: Distributed, device: torch.device) -> Iterator[ExchangeRecord]:
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
        least = min(seconds[1:])  # other load only adds
        yield ExchangeRecord(*asked.volume(workers), least)
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


def sustained(probes: Sequence[ExchangeRecord]) -> float:
    """Return 10⁹ bits per second between large requests; latency and buffers cancel.

    Args:
        probes: in ascending order of size, three or more.
    """
    less, most = probes[-3], probes[-1]
    if most.seconds > less.seconds:
        return 8e-9 * (most.nbytes - less.nbytes) / (most.seconds - less.seconds)
    return 8e-9 * most.nbytes / most.seconds
