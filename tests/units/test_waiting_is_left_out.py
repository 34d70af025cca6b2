"""Seconds that a controller sees: a message's own are told apart from waiting for a slow worker."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gc.control.probes import Probes, StepClock
from lightning_gc.controllers import ExchangeRecord
from lightning_gc.exchange.peers import Peers


def probes(communicate: list[float]) -> Any:
    """Return probes of workers in this process that have had requests of so many seconds."""
    found = Probes.__new__(Probes)
    workers = len(communicate)
    found._needs = SimpleNamespace(seconds=True, link=True)  # type: ignore[assignment]
    found._workers = SimpleNamespace(first=SimpleNamespace(workers=workers))  # type: ignore[assignment]
    found.clock = StepClock()
    found.statistics = [
        SimpleNamespace(  # type: ignore[misc]
            engine=SimpleNamespace(worker=worker),
            phases=lambda took=took: {"compress": 0.5, "communicate": took},
            exchanges=lambda took=took: (
                ExchangeRecord(1, 1e6, took),
                ExchangeRecord(2, 2e6, took),
            ),
            timed_steps=2,
            modelled=False,
        )
        for worker, took in enumerate(communicate)
    ]
    return found


def peers() -> Peers:
    return Peers(True, torch.device("cpu"))


@pytest.mark.parametrize("took", [[2.0, 8.0, 5.0], [8.0, 5.0, 2.0]])
def test_the_last_to_come_waits_for_nobody(took: list[float]) -> None:
    """Mean seconds of two steps: 1 of each message, and the others' waiting, 3 and 1.5."""
    phases = probes(took).seconds(peers())["phase_seconds"]
    assert phases == pytest.approx({"compress": 0.25, "communicate": 1.0, "wait": 1.5})
    link = probes(took).link(peers())
    assert [each.seconds for each in link["exchanges"]] == pytest.approx([2.0, 2.0])
    assert [each.messages for each in link["exchanges"]] == [1, 2]


def test_one_worker_and_equal_ones_do_not_wait() -> None:
    for took in ([3.0], [3.0, 3.0]):
        phases = probes(took).seconds(peers())["phase_seconds"]
        assert phases == pytest.approx({"compress": 0.25, "communicate": 1.5})
