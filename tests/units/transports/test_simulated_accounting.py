"""A simulated worker's account shows its own bytes, and its share of the computing time."""

import time

import pytest
import torch

from lightning_gc.core.flow import Exchange, Flow
from lightning_gc.transports.accounting import COMPUTE
from lightning_gc.transports.simulated import Ledger

CPU = torch.device("cpu")


def test_each_account_has_its_own_workers_bytes() -> None:
    """To each of the two others worker 0 sends 8 bytes, worker 1 sends 16, worker 2 none.

    With the seal, of 8 bytes, a message is a multiple of 16.
    """

    def flow(numel: int) -> Flow:
        yield Exchange(tuple((torch.zeros(numel),) for _ in range(3)), (4,))

    ledger = Ledger(3)
    ledger.run([flow(numel) for numel in (2, 4, 0)], CPU)
    lengths = 2 * 8
    assert [page.sent_bytes - lengths for page in ledger.pages] == [32, 64, 32]
    assert [page.take().wire_bytes - lengths for page in ledger.pages] == [32, 64, 32]
    assert [page.take().wire_bytes for page in ledger.pages] == [0, 0, 0]


def test_computing_time_is_shared_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    ledger = Ledger(4)
    ledger.compute.start(CPU)
    now = 6.0
    ledger.compute.lap(COMPUTE)
    assert [page.take().seconds for page in ledger.pages] == [{COMPUTE: 1.5}] * 4
    assert ledger.pages[0].take().seconds == {}
