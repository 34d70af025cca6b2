"""Ledger: accounts of W simulated workers, bytes of each worker and seconds of worker 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_gc.flow import Flow
from lightning_gc.transports.accounting import COMPUTE, Account, Stopwatch
from lightning_gc.transports.simulated import Simulated

_OTHER = "rest"


class Ledger:
    """Runs the flows of W workers in one thread and keeps an account (``Page``) for each.

    Compression and decoding are timed at worker 0, which alone decodes the mean. Each worker's
    compute time is that of all forward and backward passes divided by W. The time to pass messages
    within the process says nothing about a network and is left out.

    Args:
        workers: W.

    Attributes:
        pages: the accounts, one per worker.
        compute: stopwatch of forward and backward passes; phase ``"compute"``.
        phases: stopwatch of the flows.
    """

    def __init__(self, workers: int) -> None:
        self.transport = Simulated(workers)
        self.compute = Stopwatch()
        self.pages = [Page(self, worker) for worker in range(workers)]
        self.phases = Stopwatch()

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

    def _lap(self, phase: str, worker: int | None) -> None:
        self.phases.lap(phase if worker == 0 else _OTHER)


class Page:
    """Account of one simulated worker; ``Recording`` is that of a real one."""

    def __init__(self, ledger: Ledger, worker: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.workers = ledger.transport.workers
        self.noted: dict[str, float] = {}  # seconds already read by another page's ``take``
        self._taken = (0, 0)

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

    def take(self) -> Account:
        for phase, spent in self.ledger.seconds().items():
            for page in self.ledger.pages:
                page.noted[phase] = page.noted.get(phase, 0.0) + spent
        seconds, self.noted = self.noted, {}
        transport, before = self.ledger.transport, self._taken
        self._taken = (self.sent_bytes, transport.message_bytes[self.worker])
        return Account(self._taken[0] - before[0], self._taken[1] - before[1], seconds=seconds)
