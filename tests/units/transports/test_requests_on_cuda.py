"""Requests on a pretended device are timed by events that are read later, never waited for."""

import itertools
import time
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from lightning_gc.control.probes import Probes
from lightning_gc.controllers import BandwidthAware, Decision, ExchangeRecord, Observation
from lightning_gc.core.flow import Flow, Gather, Mean, Reply, Request
from lightning_gc.exchange.peers import Peers
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.accounting import KEPT
from lightning_gc.transports.link import fit
from tests.support.controlled_workers import CPU, Training
from tests.support.pretended_cuda import CUDA, PretendedCuda

AWARE = BandwidthAware((0.5, 0.25, 0.1, 0.01), step_seconds=5.0)
SIZES = (8, 40, 16)  # bytes of a step's requests, and eighths of a second that each takes


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    return PretendedCuda(monkeypatch)


class Link(Transport):
    """Sends 8 bytes a second, on the device if there is one, else on the host's clock."""

    worker, workers = 0, 3

    def __init__(self, cuda: PretendedCuda | None = None) -> None:
        self.cuda, self.sent_bytes, self.now = cuda, 0, 0.0

    def fulfil(self, request: Request) -> Reply:
        assert isinstance(request, Mean | Gather)
        nbytes = sum(tensor.numel() for tensor in request.tensors)
        self.sent_bytes += nbytes
        if self.cuda is None:
            self.now += nbytes / 8
        else:
            self.cuda.queued += nbytes / 8
        return list(request.tensors)


def talk(sizes: Sequence[int]) -> Flow:
    for number, size in enumerate(sizes):
        tensors = (torch.zeros(size, dtype=torch.uint8),)
        yield Mean(tensors) if number % 2 else Gather(tensors)


def asked(transport: Transport) -> Recording:
    recording = Recording(transport)
    recording.exchanges = deque(maxlen=KEPT)
    return recording


def read(recording: Recording) -> list[ExchangeRecord]:
    return list(recording.exchanges or ())


def expected(sizes: Sequence[int]) -> list[ExchangeRecord]:
    """Return the records of a flow of requests of these sizes."""
    messages = itertools.cycle((2, 4))  # a gather and a mean of three workers
    return [ExchangeRecord(next(messages), size, size / 8) for size in sizes]


def test_requests_arrive_in_order_once_each_and_nobody_waits(cuda: PretendedCuda) -> None:
    recording, seen = asked(Link(cuda)), list[ExchangeRecord]()
    for _ in range(5):
        recording.run(talk(SIZES), CUDA)
        cuda.reached = cuda.queued - 3.0  # in the last but one request
        seen.append(read(recording)[-1])
    assert seen == [expected(SIZES)[0]] * 5
    assert read(recording) == (5 * expected(SIZES))[:-2]
    cuda.reached = cuda.queued
    assert read(recording) == read(recording) == 5 * expected(SIZES)
    assert cuda.log == []


def test_time_between_requests_is_none_of_theirs(cuda: PretendedCuda) -> None:
    """Seconds count from when the stream reaches a request."""
    recording = asked(Link(cuda))
    for _ in range(3):
        cuda.queued += 100.0  # a backward pass
        recording.run(talk(SIZES), CUDA)
    cuda.reached = cuda.queued
    assert read(recording) == 3 * expected(SIZES)


def test_a_step_makes_no_event(cuda: PretendedCuda) -> None:
    recording = asked(Link(cuda))
    for step in range(100):
        cuda.reached = cuda.queued  # the device is a step behind
        recording.run(talk(SIZES), CUDA)
        assert cuda.made == 2 * len(SIZES), step


def test_the_latest_requests_are_kept(cuda: PretendedCuda) -> None:
    recording = asked(Link(cuda))
    for size in range(1, 2 * KEPT):
        recording.run(talk([size]), CUDA)
        cuda.reached = cuda.queued
    assert read(recording) == [(2, size, size / 8) for size in range(KEPT, 2 * KEPT)]


def test_a_device_far_behind_is_timed_too(cuda: PretendedCuda) -> None:
    """No more events than for ``KEPT`` requests, of which none is given up."""
    recording = asked(Link(cuda))
    recording.run(talk(range(1, 10 * KEPT)), CUDA)
    assert (cuda.made, read(recording)) == (2 * KEPT, [])
    cuda.reached = cuda.queued
    assert [record.nbytes for record in read(recording)] == [*range(1, KEPT + 1)]
    recording.run(talk([7]), CUDA)
    cuda.reached = cuda.queued
    assert read(recording)[-1] == (2, 7, 7 / 8)
    assert cuda.made == 2 * KEPT


def test_without_a_controller_there_are_no_events(cuda: PretendedCuda) -> None:
    recording = Recording(Link(cuda))
    recording.run(talk(SIZES), CUDA)
    assert (recording.exchanges, cuda.made) == (None, 0)


def test_what_ends_after_a_decision_counts_for_the_next(cuda: PretendedCuda) -> None:
    """Also a request that ends while the controller decides."""
    made, recording = Training(1), asked(Link(cuda))
    made.workers.start([recording], revocable=False)
    probes = Probes(AWARE, made.workers)
    probes.statistics[0].attach(recording)
    recording.run(talk(SIZES), CUDA)
    told = []
    for behind in (2.5, 1.0, 0.0):
        cuda.reached = cuda.queued - behind
        told.append(probes.link(Peers(True, torch.device("cpu"), mean=lambda t: t))["exchanges"])
        cuda.reached += 0.5
        probes.begin()
    assert [list(each) for each in told] == [[record] for record in expected(SIZES)]
    assert cuda.log == []


def decided(recording: Recording) -> tuple[Decision, object]:
    """Return the decision and the new state after two steps of 10 s each."""
    exchanges = tuple(read(recording))
    link, r2 = fit(exchanges)
    observation = Observation(
        0, steps=2, wire_bytes=recording.sent_bytes, step_seconds=10.0, exchanges=exchanges,
        latency_us=link.latency_us, bandwidth_gbps=link.gbps, link_r2=r2,
    )  # fmt: skip
    return AWARE.decide(observation, AWARE.init() | {"level": 0})


def test_controllers_decide_as_on_the_host(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link()
    monkeypatch.setattr(time, "perf_counter", lambda: link.now)
    host, device = asked(link), asked(Link(cuda))
    for recording, where in ((host, CPU), (device, CUDA)):
        for _ in range(2):
            recording.run(talk(SIZES), where)
    cuda.reached = cuda.queued
    assert decided(device) == decided(host)
    assert decided(device)[0].level == 0.1
