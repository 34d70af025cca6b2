"""A stopwatch keeps no more CUDA events than a pretended device is behind."""

import threading
from typing import Any

import pytest
import torch

from lightning_gc.core.flow import Flow, Reply, Request
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.accounting import Stopwatch
from lightning_gc.transports.simulated import Ledger
from tests.support.pretended_cuda import CUDA, PretendedCuda


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    """Return a device that does one second of work between two events."""
    found = PretendedCuda(monkeypatch)
    found.pace = 1.0
    return found


class Silent(Transport):
    """For flows that request nothing."""

    worker, workers, sent_bytes = 0, 1, 0

    def fulfil(self, request: Request) -> Reply:
        raise AssertionError


def nothing() -> Flow:
    yield from ()


def test_who_does_not_ask_for_seconds_makes_no_events(cuda: PretendedCuda) -> None:
    """A run without a monitor."""
    recording = Recording(Silent())
    for _ in range(100):
        recording.run(nothing(), CUDA)
    ledger = Ledger(1)
    ledger.compute.start(CUDA)
    ledger.compute.lap("compute")
    ledger.run([nothing()], CUDA)
    assert cuda.made == 0
    assert recording.take().seconds == {}


def test_events_end_though_nobody_takes_the_seconds(cuda: PretendedCuda) -> None:
    watch = Stopwatch()
    watch.timing = True
    for _ in range(1000):
        watch.start(CUDA)
        for phase in ("compress", "communicate", "decode"):
            watch.lap(phase)
        cuda.reached = cuda.queued - 8  # the device is two rounds behind
    assert len(cuda.events) <= 13
    assert watch.take() == {"compress": 1000.0, "communicate": 1000.0, "decode": 1000.0}
    assert watch.take() == {}


def test_seconds_that_are_taken_while_they_are_added_are_counted_once() -> None:
    """The monitor takes them in another thread, here where they have been read, but not written."""
    watch, taken = Stopwatch(), list[dict[str, float]]()
    taker = threading.Thread(target=lambda: taken.append(watch.take()))

    class Slow(dict[str, float]):
        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            if threading.current_thread() is not taker:
                taker.start()
                taker.join(0.5)
            return found

    watch._seconds = Slow(compute=10.0)
    watch.start(torch.device("cpu"))
    watch.lap("compute")
    taker.join()
    assert taken[0]["compute"] >= 10
    assert watch.take().get("compute", 0.0) < 10
