"""The background thread never blocks its caller, keeps order, and hands back errors."""

import threading
import time
from typing import Any

import pytest
import torch

from lightning_gc.core.flow import Flow, Gather, Mean, Reply, Request
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.background import Background

CPU = torch.device("cpu")


class Gate(Transport):
    """Answers a request when the test opens the gate."""

    worker, workers = 0, 1

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.open = threading.Event()

    def fulfil(self, request: Request) -> Reply:
        assert self.open.wait(timeout=20)
        self.sent_bytes += 10
        return []


def asking(log: list[Any], name: str, rounds: int = 2) -> Flow:
    for _ in range(rounds):
        yield Mean((torch.zeros(1),))
    log.append((name, torch.is_grad_enabled()))


def failing() -> Flow:
    yield Gather((torch.zeros(1),))
    raise ValueError("a damaged message")


def test_submit_returns_while_the_network_is_busy() -> None:
    gate = Gate()
    log: list[Any] = []
    background = Background(Recording(gate), CPU)
    buffers = [torch.zeros(1) for _ in range(3)]
    futures = [
        background.submit(asking(log, name), buffer)
        for name, buffer in zip("abc", buffers, strict=True)
    ]
    assert not any(future.done() for future in futures)
    gate.open.set()
    assert [future.wait() for future in futures] == buffers
    assert log == [("a", False), ("b", False), ("c", False)]
    assert background.close()


def test_an_error_is_raised_by_check_and_later_flows_are_refused() -> None:
    gate = Gate()
    log: list[Any] = []
    gate.open.set()
    background = Background(Recording(gate), CPU)
    background.submit(failing(), torch.zeros(1)).wait()
    background.submit(asking(log, "late"), torch.zeros(1)).wait()
    assert log == []
    with pytest.raises(ValueError, match="a damaged message"):
        background.check()
    assert background.close()


def test_recording_tells_phases_and_bytes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.open.set()
    recording = Recording(gate)
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def slow() -> Flow:
        nonlocal now
        now += 0.5
        yield Mean((torch.zeros(1),))
        now += 2.0

    recording.run(slow(), CPU)
    account = recording.take()
    assert account.seconds == {"compress": 0.5, "communicate": 0.0, "decode": 2.0}
    assert account.wire_bytes == 10
    assert recording.take().wire_bytes == 0


def test_nothing_is_promised_after_the_end() -> None:
    """Nobody would keep it: DDP would wait for ever."""
    background = Background(Recording(Gate()), CPU)
    assert background.close()
    with pytest.raises(RuntimeError, match="after the exchange was closed"):
        background.submit(asking([], "late"), torch.zeros(1))
