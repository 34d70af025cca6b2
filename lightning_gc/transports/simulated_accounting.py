"""Ledger: accounts of W simulated workers, bytes of each worker and seconds of worker 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from lightning_gc.controllers.exchange_record import ExchangeRecord
from lightning_gc.flow import Flow
from lightning_gc.network_model import NetworkModel
from lightning_gc.transports.accounting import COMMUNICATE, COMPUTE, Account, Stopwatch
from lightning_gc.transports.simulated import Simulated

_OTHER = "rest"


class Ledger:
    """Runs the flows of W workers in one thread and keeps an account (``Page``) for each.

    Compression and decoding are timed at worker 0, which alone decodes the mean. Each worker's
    compute time is that of all forward and backward passes divided by W. The time to pass messages
    within the process says nothing about a network and is left out.

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
        self._sent = 0  # bytes before this request, of the worker that has sent most

    def run(self, flows: Sequence[Flow], device: torch.device) -> None:
        self.phases.start(device)
        with torch.no_grad():
            self.transport.run(flows, self._lap)

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
            sent, kind = max(self.transport.sent_bytes), self.transport.requested
            record = self.network.request(kind, sent - self._sent, len(self.pages), self.step)
            self._sent = sent
            self.communicated += record.seconds
            if self.exchanges is not None:
                self.exchanges.append(record)
        self.phases.lap(phase if worker == 0 else _OTHER)


class Page:
    """Account of one simulated worker; ``Recording`` is that of a real one."""

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
        """The latest requests, which are alike for all workers."""
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
        return Account(sent, said, within, seconds)
