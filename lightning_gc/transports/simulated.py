"""Simulated: transport between W workers in one thread, for tests and simulations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gc.controllers.base import ExchangeRecord
from lightning_gc.core import Exchange, Flow, Gather, Mean, MeanShard, Reply, Request, averaged
from lightning_gc.core.flow import described, resume, undisturbed
from lightning_gc.transports.accounting import (
    COMMUNICATE,
    COMPRESS,
    COMPUTE,
    DECODE,
    Account,
    Stopwatch,
)
from lightning_gc.transports.base import (
    LENGTH_BYTES,
    all_gather_bytes,
    all_reduce_bytes,
    by_leg,
    check_lengths,
    laid_out,
    lengths_of,
    reduce_scatter_bytes,
    uneven_gather_bytes,
)
from lightning_gc.transports.network_model import NetworkModel
from lightning_gc.transports.peer_error import MessageError


class Simulated:
    """Runs one flow per worker in lockstep and fulfils each request for all workers at once.

    Requests that differ between workers, which would hang on a real network, are an error here.

    Attributes:
        workers: W.
        per_node: workers with consecutive indices that are a node, as for ``Distributed``.
        sent_bytes: per worker, the bytes that ``Distributed`` would have sent.
        node_bytes: per worker, those that it counts apart.
        requested: kind of the last request, such as ``"Mean"``.
        busiest: the most bytes that a worker sent in it, and the most that one received.
        message_bytes: per worker, the bytes of its messages, each counted once for all receivers.
    """

    def __init__(self, workers: int, per_node: int = 1) -> None:
        if workers < 1:
            raise ValueError(f"Simulated(workers={workers}): at least one worker is needed.")
        self.workers = workers
        self.per_node = per_node
        self.sent_bytes = [0] * workers
        self.node_bytes = [0] * workers
        self.message_bytes = [0] * workers
        self.requested = ""
        self.busiest = (0, 0)
        self._arrived: list[int] = []  # per worker, the bytes of the last ``Exchange``

    @undisturbed()
    def run(
        self,
        flows: Sequence[Flow],
        lap: Callable[[str, int | None], None] = lambda phase, worker: None,
    ) -> None:
        """Run one flow per worker; ValueError for a wrong number, or requests that differ.

        ``lap`` is called at the end of each phase with its name and worker; None: all workers.
        """
        if len(flows) != self.workers:
            raise ValueError(f"{self.workers} workers need as many flows, but got {len(flows)}.")
        requests = []
        for worker, flow in enumerate(flows):
            requests.append(next(flow, None))
            lap(COMPRESS, worker)
        while any(request is not None for request in requests):
            self._check_agreement(requests)
            replies = self.fulfil([request for request in requests if request is not None])
            lap(COMMUNICATE, None)
            requests = []
            for worker, (flow, reply) in enumerate(zip(flows, replies, strict=True)):
                requests.append(resume(flow, reply))
                lap(DECODE, worker)

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        first, before = requests[0], self.sent_bytes
        self.requested, self.sent_bytes = type(first).__name__, [*before]
        if isinstance(first, Mean):
            replies = self._mean([r for r in requests if isinstance(r, Mean)])
        elif isinstance(first, Gather):
            replies = self._gather([r for r in requests if isinstance(r, Gather)])
        elif isinstance(first, Exchange):
            replies = self._exchange([r for r in requests if isinstance(r, Exchange)])
        else:
            replies = self._mean_shard([r for r in requests if isinstance(r, MeanShard)])
        sent = [now - then for now, then in zip(self.sent_bytes, before, strict=True)]
        # In a ring the next worker receives what this one sends.
        received = self._arrived if isinstance(first, Exchange) else sent
        self.busiest = max(sent), max(received)
        return replies

    def _mean(self, requests: Sequence[Mean]) -> list[Reply]:
        """Average in place: the requests' tensors are consumed."""
        given = [r.tensors for r in requests]
        means: list[Tensor] = []
        for first, *others in zip(*given, strict=True):
            if first.dtype.itemsize < 4:  # rounded once, not once per worker
                first.copy_(torch.stack([t * (1 / self.workers) for t in (first, *others)]).sum(0))
            else:
                first.mul_(1 / self.workers)
                for other in others:
                    first.add_(other.mul_(1 / self.workers))
            for other in others:
                other.copy_(first)
            means.append(first)
        for dtype in {mean.dtype for mean in means}:  # one all-reduce each, as in Distributed
            nbytes = sum(mean.numel() * dtype.itemsize for mean in means if mean.dtype == dtype)
            self._count(all_reduce_bytes(nbytes, self.workers))
            self.message_bytes = [old + nbytes for old in self.message_bytes]
        return [list(tensors) for tensors in given]

    def _mean_shard(self, requests: Sequence[MeanShard]) -> list[Reply]:
        sent = reduce_scatter_bytes(sum(t.nbytes for t in requests[0].tensors), self.workers)
        self._count(sent)
        self.message_bytes = [old + sent for old in self.message_bytes]
        payloads = [r.as_exchange(self.workers).payloads for r in requests]
        return [averaged(to_one) for to_one in zip(*payloads, strict=True)]

    def _gather(self, requests: Sequence[Gather]) -> list[Reply]:
        first = requests[0]
        own = [laid_out(r.tensors, r.limits).nbytes for r in requests]
        lengths = 0
        if first.limits is not None:
            for sender, r in enumerate(requests):
                check_lengths(lengths_of(r.tensors), first.tensors, first.limits, sender)
                if first.lengths and lengths_of(r.tensors) != list(first.lengths[sender]):
                    raise MessageError(
                        f"Worker {sender} has sent tensors of {lengths_of(r.tensors)} elements, "
                        f"but has announced {list(first.lengths[sender])}; it was damaged."
                    )
            if first.lengths is None:
                lengths = LENGTH_BYTES * len(first.tensors)
        for sender, nbytes in enumerate(own):
            self.message_bytes[sender] += nbytes + lengths
            self.sent_bytes[sender] += uneven_gather_bytes(own, sender)
        self._count(all_gather_bytes(lengths, self.workers))
        return [[list(r.tensors) for r in requests] for _ in requests]

    def _exchange(self, requests: Sequence[Exchange]) -> list[Reply]:
        first, lengths = requests[0], 0
        if first.limits is not None:
            lengths = all_gather_bytes(LENGTH_BYTES * len(first.payloads[0]), self.workers)
        sizes = [[laid_out(p, first.limits).nbytes for p in r.payloads] for r in requests]
        self._arrived = [
            by_leg(column, receiver, self.per_node)[0] + lengths
            for receiver, column in enumerate(zip(*sizes, strict=True))
        ]
        for sender, r in enumerate(requests):
            nbytes, within = by_leg(sizes[sender], sender, self.per_node)
            nbytes += lengths
            self.node_bytes[sender] += within
            if first.limits is not None:
                for own, payload in zip(first.payloads, r.payloads, strict=True):
                    check_lengths(lengths_of(payload), own, first.limits, sender)
            self.sent_bytes[sender] += nbytes
            self.message_bytes[sender] += nbytes
        return [[list(r.payloads[i]) for r in requests] for i in range(self.workers)]

    def _count(self, nbytes: int) -> None:
        self.sent_bytes = [old + nbytes for old in self.sent_bytes]

    def _check_agreement(self, requests: Sequence[Request | None]) -> None:
        asked = [described(request) for request in requests]
        for worker, other in enumerate(asked):
            if other != asked[0]:
                raise ValueError(
                    f"Worker 0 asks for {asked[0]}, but worker {worker} for {other}; on a real "
                    f"network this is a hang. All workers need the same configuration and shapes."
                )


_OTHER = "rest"


class Ledger:
    """Runs the flows of W workers in one thread and keeps an account (``Page``) for each.

    Compression and decoding are timed at worker 0, which alone decodes the mean. A worker's compute
    time is the time of all forward and backward passes divided by W. Time to pass messages within
    the process is left out.

    Args:
        workers: W.
        network: from which the seconds of requests are computed, for controllers; None for none.
        per_node: workers that are a node, as for ``Simulated``.

    Attributes:
        pages: the accounts, one per worker.
        compute: stopwatch of forward and backward passes; phase ``"compute"``.
        phases: stopwatch of the flows.
        communicated: computed seconds of all requests.
        exchanges: the latest requests; None keeps none.
        step: number of the round, by which the network's bandwidth is scheduled.
    """

    def __init__(
        self, workers: int, network: NetworkModel | None = None, per_node: int = 1
    ) -> None:
        self.network = network
        self.communicated = 0.0
        self.exchanges: deque[ExchangeRecord] | None = None
        self.step = 0
        self.transport = Simulated(workers, per_node)
        self.compute = Stopwatch()
        self.pages = [Page(self, worker) for worker in range(workers)]
        self.phases = Stopwatch()

    def run(self, flows: Sequence[Flow], device: torch.device) -> None:
        self.phases.start(device)
        with torch.no_grad():
            self.transport.run(flows, self._lap)

    def timed(self, flows: Sequence[Flow]) -> dict[str, float]:
        """Run one flow per worker; return phase -> seconds of worker 0, which no step has."""
        apart = Ledger(self.transport.workers, self.network, self.transport.per_node)
        apart.transport = self.transport  # which counts the bytes
        apart.step, apart.phases.timing = self.step, True
        apart.run(flows, self.phases.device)
        return apart.seconds() | ({COMMUNICATE: apart.communicated} if self.network else {})

    def seconds(self) -> dict[str, float]:
        """Return and reset the seconds by phase of one worker."""
        seconds = self.phases.take()
        seconds.pop(_OTHER, None)
        computed = self.compute.take().get(COMPUTE, 0.0) / self.transport.workers
        return seconds | ({COMPUTE: computed} if computed else {})

    def totals(self) -> dict[str, float]:
        """Return the seconds by phase of one worker since the beginning, with computed requests."""
        seconds = self.phases.totals()
        seconds.pop(_OTHER, None)
        if COMPUTE in (computed := self.compute.totals()):
            seconds[COMPUTE] = computed[COMPUTE] / self.transport.workers
        return seconds | ({COMMUNICATE: self.communicated} if self.network is not None else {})

    def _lap(self, phase: str, worker: int | None) -> None:
        if phase == COMMUNICATE and self.network is not None:
            kind, (sent, received) = self.transport.requested, self.transport.busiest
            record = self.network.request(kind, sent, len(self.pages), self.step, received)
            self.communicated += record.seconds
            if self.exchanges is not None:
                self.exchanges.append(record)
        self.phases.lap(phase if worker == 0 else _OTHER)


class Page:
    """Account of one simulated worker, as ``Recording`` is for a real one."""

    def __init__(self, ledger: Ledger, worker: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.workers = ledger.transport.workers
        self.noted: dict[str, float] = {}  # seconds already read by another page's ``take``
        self._taken = (0, 0, 0)

    @property
    def sent_bytes(self) -> int:
        return self.ledger.transport.sent_bytes[self.worker]

    @property
    def timing(self) -> bool:
        """Whether CUDA streams are timed, for all workers."""
        return self.ledger.phases.timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self.ledger.phases.timing = self.ledger.compute.timing = on

    @property
    def modelled(self) -> bool:
        """Whether seconds of requests are computed, by a network's model."""
        return self.ledger.network is not None

    @property
    def exchanges(self) -> deque[ExchangeRecord] | None:
        """The latest requests, equal for all workers."""
        return self.ledger.exchanges

    @exchanges.setter
    def exchanges(self, kept: deque[ExchangeRecord] | None) -> None:
        self.ledger.exchanges = kept

    def seconds(self) -> dict[str, float]:
        return self.ledger.totals()

    def take(self) -> Account:
        for phase, spent in self.ledger.seconds().items():
            for page in self.ledger.pages:
                page.noted[phase] = page.noted.get(phase, 0.0) + spent
        seconds, self.noted = self.noted, {}
        transport, before, me = self.ledger.transport, self._taken, self.worker
        self._taken = (self.sent_bytes, transport.message_bytes[me], transport.node_bytes[me])
        sent, said, within = (now - then for now, then in zip(self._taken, before, strict=True))
        return Account(sent, said, within, seconds=seconds)
