"""The accounts of W simulated workers: bytes of each, seconds of one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_gc.flow import Flow
from lightning_gc.transports.accounting import Account
from lightning_gc.transports.simulated import Simulated
from lightning_gc.transports.timer import COMPUTE, Stopwatch

_REST = "rest"


class Ledger:
    """Runs the flows of W workers in one thread and keeps a page for each.

    Compression and decoding are timed at worker 0, who alone decodes the mean: all get the same.
    Of forward and backward passes, each is given the W-th part of the time of all. What it takes to
    hand messages over is left out, for no network does that.

    Args:
        workers: W.

    Attributes:
        pages: the accounts, one per worker.
        compute: the watch for forward and backward passes; phase ``"compute"``.
    """

    def __init__(self, workers: int) -> None:
        self.transport = Simulated(workers)
        self.compute = Stopwatch()
        self.pages = [Page(self, worker) for worker in range(workers)]
        self._exchange = Stopwatch()

    @property
    def timing(self) -> bool:
        """Whether CUDA is timed."""
        return self._exchange.timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self._exchange.timing = self.compute.timing = on

    def run(self, flows: Sequence[Flow], device: torch.device) -> None:
        """Drive one flow per worker to their end, timing their phases."""
        self._exchange.start(device)
        with torch.no_grad():
            self.transport.run(flows, self._lap)

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase since the last call, of one worker."""
        seconds = self._exchange.take()
        seconds.pop(_REST, None)
        computed = self.compute.take().get(COMPUTE, 0.0) / self.transport.workers
        return seconds | ({COMPUTE: computed} if computed else {})

    def _lap(self, phase: str, worker: int | None) -> None:
        self._exchange.lap(phase if worker == 0 else _REST)


class Page:
    """One simulated worker's account; what ``Recording`` is to a real one."""

    def __init__(self, ledger: Ledger, worker: int) -> None:
        self.ledger = ledger
        self.worker = worker
        self.workers = ledger.transport.workers
        self.noted: dict[str, float] = {}  # seconds that another page's ``take`` has read
        self._taken = (0, 0)

    @property
    def sent_bytes(self) -> int:
        """What this worker would have sent so far."""
        return self.ledger.transport.sent_bytes[self.worker]

    @property
    def timing(self) -> bool:
        """Whether CUDA is timed, for all workers."""
        return self.ledger.timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self.ledger.timing = on

    def take(self) -> Account:
        """Return the totals since the last call and start anew. Waits for CUDA where timed."""
        for phase, spent in self.ledger.seconds().items():
            for page in self.ledger.pages:
                page.noted[phase] = page.noted.get(phase, 0.0) + spent
        seconds, self.noted = self.noted, {}
        transport, before = self.ledger.transport, self._taken
        self._taken = (self.sent_bytes, transport.message_bytes[self.worker])
        return Account(self._taken[0] - before[0], self._taken[1] - before[1], seconds=seconds)
