"""Trace one worker's step: its requests and computation, from real flows, for any W.

The flows of W workers run in one thread, as in a simulation. A trace has the size of each request,
and worker 0's seconds before, between and after its requests. Both depend on W by a pattern,
which is fitted to small W and checked against the largest one.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.advice.description import Shapes as Shapes
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core import Exchange, Gather, Mean, Reply, Request
from lightning_gc.core.refusal import refuse
from lightning_gc.engine import Engine
from lightning_gc.exchange.timeline import BucketWork
from lightning_gc.kernels import dispatch
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.base import LENGTH_BYTES
from lightning_gc.transports.link import Links, messages_sent
from lightning_gc.transports.simulated import Simulated


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        kind: ``"Mean"``, ``"Gather"`` or ``"Exchange"``.
        nbytes: bytes of the message: for a mean, of the averaged tensors; for a gather, of one
            worker's payload; for an exchange, of the payload for one other worker. The worker that
            sends most counts, because all wait for it.
        collectives: all-reduces, one per dtype; 1 for other kinds.
        lengths: bytes that announce the lengths of a ragged payload to one other worker.
        received: bytes that arrive from one other worker, where most arrive; None: ``nbytes``.
    """

    kind: str
    nbytes: float
    collectives: int = 1
    lengths: int = 0
    received: float | None = None

    @property
    def arriving(self) -> float:
        """Bytes that arrive from one other worker, where most arrive."""
        return self.nbytes if self.received is None else self.received

    def volume(self, workers: int) -> tuple[float, float, float]:
        """Return the messages and bytes that a worker sends, and the bytes that it receives.

        A ring all-reduce takes 2·(W − 1) messages of 1/W each, a ring all-gather W − 1 payloads, an
        all-to-all W − 1 messages. A ragged all-gather sends its lengths in an all-gather before it;
        an all-to-all sends them in front of each message.
        """
        others, messages = workers - 1, messages_sent(self.kind, workers)
        if self.kind == "Mean":
            ring = 2 * others * self.nbytes / workers
            return messages * self.collectives, ring, ring
        ahead = others if self.lengths and self.kind == "Gather" else 0
        sent, arriving = (others * (each + self.lengths) for each in (self.nbytes, self.arriving))
        return messages + ahead, sent, arriving

    def takes(self, workers: int, links: Links) -> float:
        """Return the seconds of the request among W workers."""
        return links[self.kind].seconds(*self.volume(workers))


@dataclass(frozen=True)
class Trace:
    """A step of one worker among W.

    Attributes:
        workers: W.
        asked: its requests in order.
        seconds: of computation, before, between and after the requests.
        sent: bytes that one worker sends, on average, as the transport counts them.
    """

    workers: int
    asked: tuple[Asked, ...]
    seconds: tuple[float, ...]
    sent: float = 0.0

    @property
    def nbytes(self) -> float:
        """Bytes that the busiest worker sends."""
        return math.fsum(asked.volume(self.workers)[1] for asked in self.asked)

    def takes(self, links: Links) -> float:
        """Return the seconds of the exchange: computation and requests, nothing overlapped."""
        return self.work(0.0, links).seconds

    def work(self, ready: float, links: Links) -> BucketWork:
        """Return the exchange of a bucket that is ready so many seconds into the backward pass."""
        took = tuple(each.takes(self.workers, links) for each in self.asked)
        return BucketWork(ready, self.seconds, took)


def dense(nbytes: float, workers: int) -> Trace:
    """Return a ring all-reduce of so many bytes, which computes nothing."""
    return Trace(workers, (Asked("Mean", nbytes),), (0.0, 0.0))


class Listening(Simulated):
    """Simulated workers; records their requests."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.asked: list[Asked] = []

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        """Record one round, and answer it."""
        first, others = requests[0], max(self.workers - 1, 1)
        if isinstance(first, Mean):
            nbytes = sum(t.numel() * t.element_size() for t in first.tensors)
            self.asked.append(Asked("Mean", nbytes, len({t.dtype for t in first.tensors})))
            return super().fulfil(requests)
        assert isinstance(first, Gather | Exchange), "shards are asked for in FSDP only"
        payload = first.tensors if isinstance(first, Gather) else first.payloads[0]
        known = first.limits is None or (isinstance(first, Gather) and first.lengths is not None)
        lengths = 0 if known else LENGTH_BYTES * len(payload)
        replies = super().fulfil(requests)
        sent, received = (nbytes / others - lengths for nbytes in self.busiest)
        self.asked.append(Asked(self.requested, sent, lengths=lengths, received=received))
        return replies


def engines(
    compressor: Compressor,
    scheme: Scheme | None,
    workers: int,
    mine: Sequence[int],
    memory: Memory | None = None,
) -> list[Engine]:
    """Return engines as the strategy makes them, for the workers ``mine``."""
    whole = by_default(compressor)
    return [Engine(whole, memory, scheme, worker=i, workers=workers) for i in mine]


def _nothing() -> None:
    """Do nothing; on the host nothing runs asynchronously."""


def gradient(shapes: Shapes, worker: int) -> Tensor:
    """Return a worker's gradient: a part that all share, plus noise of the same size."""
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    common, own = (
        torch.randn(
            numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        for seed in (0, 1 + worker)
    )
    return common.add_(own).mul_(2**-0.5)


def trace(
    compressor: Compressor,
    scheme: Scheme | None,
    shapes: Shapes,
    workers: int,
    repeat: int,
    *,
    memory: Memory | None = None,
    own: Tensor | None = None,
) -> Trace:
    """Run steps of W simulated workers; the first one, which creates the errors, does not count.

    Args:
        compressor: as for a strategy; so are ``scheme`` and ``memory``.
        scheme: None for the default.
        shapes: of the parameters in the bucket.
        workers: W.
        repeat: measured steps.
        memory: None for the default.
        own: every worker's gradient, ``(numel,)``, on the device to be timed; None draws them.

    Returns:
        The median seconds of worker 0, and the requests of the last step.
    """
    transport = Listening(workers)
    ours = engines(compressor, scheme, workers, range(workers), memory)
    given = None if own is None else own.detach()
    gradients = [gradient(shapes, w) if given is None else given for w in range(workers)]
    wait = torch.cuda.synchronize if gradients[0].device.type == "cuda" else _nothing
    found: list[list[float]] = []
    before = 0.0
    for _ in range(1 + repeat):
        flats = [flat.clone() for flat in gradients]
        flows = []
        for engine, flat in zip(ours, flats, strict=True):
            flows.append(engine.flow(flat, shapes, wanted=engine.worker == 0))
            engine.advance()
        seconds: list[float] = []
        wait()
        mark = time.perf_counter()

        def lap(phase: str, worker: int | None, seconds: list[float] = seconds) -> None:
            nonlocal mark
            wait()
            now = time.perf_counter()
            if worker == 0:
                seconds.append(now - mark)
            mark = time.perf_counter()

        transport.asked.clear()
        before = sum(transport.sent_bytes)
        with torch.no_grad():
            transport.run(flows, lap)
        found.append(seconds)
        dispatch.host.wait()  # else torch's operations would be measured
    medians = tuple(map(statistics.median, zip(*found[1:], strict=True)))
    sent = (sum(transport.sent_bytes) - before) / workers
    return Trace(workers, tuple(transport.asked), medians, sent)


@dataclass(frozen=True)
class Pattern:
    """Extrapolates a trace to any W.

    A message has ``a + b/W + c·W`` bytes: full payloads, shards, numbers per worker. The seconds of
    computation have the same form: the own gradient, a shard, each arriving payload.

    Attributes:
        like: one of the traces, which agree in the kinds of requests and in lengths.
        sizes: (a, b, c) of the sent and of the received bytes of every request.
        seconds: (a, b, c) of the computation before, between and after the requests.
    """

    like: Trace
    sizes: tuple[tuple[tuple[float, ...], ...], ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, workers: int) -> Trace:
        """Return the trace for this number of workers."""
        terms = _terms(workers)
        asked = tuple(
            replace(old, nbytes=float(terms @ out), received=float(terms @ arriving))
            for old, (out, arriving) in zip(self.like.asked, self.sizes, strict=True)
        )
        return Trace(workers, asked, tuple(float(terms @ each) for each in self.seconds))


def pattern(traces: Sequence[Trace]) -> Pattern:
    """Find the pattern of traces in ascending order of W.

    Raises:
        ValueError: the kinds of requests depend on W.
    """
    *_, largest = traces
    kinds = {tuple((a.kind, a.collectives, a.lengths) for a in each.asked) for each in traces}
    if len(kinds) > 1:
        refuse(f"The requests depend on the number of workers: {kinds}")
    sent = _fit(traces, [[asked.nbytes for asked in each.asked] for each in traces])
    received = _fit(traces, [[asked.arriving for asked in each.asked] for each in traces])
    seconds = _fit(traces, [list(each.seconds) for each in traces])
    return Pattern(largest, tuple(zip(sent, received, strict=True)), seconds)


def _terms(workers: int) -> Any:
    return np.array([1.0, 1 / workers, workers])


def _fit(traces: Sequence[Trace], rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    terms = np.array([_terms(each.workers) for each in traces])
    return tuple(_solve(terms, column) for column in zip(*rows, strict=True))


def _solve(terms: Any, column: Sequence[float]) -> tuple[float, ...]:
    """Return the non-negative least-squares solution for the relative errors."""
    values = np.array(column)
    weights = 1 / np.maximum(values, values.max() * 1e-9 + 1e-12)
    kept = list(range(terms.shape[1]))
    while True:  # the most negative term goes first; of three, that is precise enough
        found = np.linalg.lstsq(terms[:, kept] * weights[:, None], values * weights, rcond=None)[0]
        if (found >= -1e-9 * values.max()).all() or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    whole = np.zeros(terms.shape[1])
    whole[kept] = np.maximum(found, 0)
    return tuple(whole.tolist())
