"""What a controller is told of seconds, requests and the link, and traces of it."""

import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from lightning_gc import NetworkModel, TopK
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.control.probes import StepClock
from lightning_gc.controllers import (
    BandwidthAware,
    CongestionAIMD,
    Controller,
    Curve,
    Decision,
    ExchangeRecord,
    Fixed,
    Needs,
    Observation,
    Point,
)
from lightning_gc.controllers.trace import append, replay
from lightning_gc.core.flow import Exchange, Flow, Gather, Mean, Request
from lightning_gc.exchange.peers import Peers
from lightning_gc.transports.accounting import KEPT, Recording
from lightning_gc.transports.base import Transport
from lightning_gc.transports.link import messages_sent
from lightning_gc.transports.simulated import Ledger, Simulated
from tests.support.controlled_workers import CPU, Training


class Asks(Controller):
    """Remembers what it was told."""

    def __init__(self, needs: Needs) -> None:
        self.told: list[Observation] = []
        self._needs = needs

    @property
    def needs(self) -> Needs:
        return self._needs

    def init(self) -> dict[str, Any]:
        return {}

    def every_steps(self, epoch: int) -> int:
        return 4

    def decide(
        self, observation: Observation, state: dict[str, Any]
    ) -> tuple[Decision, dict[str, Any]]:
        self.told.append(observation)
        return Decision(0.1), state


def training(network: NetworkModel | None, workers: int = 2) -> Training:
    made = Training(workers, TopK(0.1), 4096)
    made.workers.names = {torch.nn.Parameter(torch.zeros(64, 64)): "w"}
    made.ledger = Ledger(workers, network)
    made.workers.accounts = made.ledger.pages
    return made


def run(made: Training, controller: Controller, steps: int) -> None:
    control = ControlLoop(controller, made.workers)
    control.attach()
    peers, draw = Peers(True, CPU, mean=lambda t: t), np.random.default_rng(0)
    for step in range(steps):
        made.ledger.step = step
        control.decide(0, [made.sgd], lambda: Moment({}), peers)
        made.step(draw.standard_normal((len(made.workers.engines), 4096)))
    control.decide(1, [made.sgd], lambda: Moment({}), peers)


def test_simulated_workers_are_told_the_models_seconds() -> None:
    network = NetworkModel(0.01, 500.0, schedule=((6, 0.001),))
    controller = Asks(Needs(seconds=True, link=True))
    made = training(network)
    run(made, controller, 12)
    assert [told.steps for told in controller.told] == [0, 1, 1, 2, 4, 4]
    first, *_, last = controller.told
    assert (first.step_seconds, first.exchanges, first.bandwidth_gbps) == (0.0, (), 0.0)
    (size,) = {record.nbytes for record in last.exchanges}
    assert size == last.wire_bytes / last.steps
    assert {record.messages for record in last.exchanges} == {1}
    expected = 500e-6 + 8 * size / 1e6
    assert [r.seconds for r in last.exchanges] == pytest.approx([expected] * 4)
    assert last.phase_seconds["communicate"] == pytest.approx(expected)
    assert last.step_seconds == pytest.approx(sum(last.phase_seconds.values()))
    assert last.levels == {"w": 0.1}
    # Messages of one size: a bound from below.
    assert 0 < last.bandwidth_gbps <= 0.001


def test_what_is_not_declared_is_not_kept() -> None:
    controller = Asks(Needs())
    made = training(NetworkModel(0.01))
    run(made, controller, 3)
    assert made.ledger.exchanges is None
    for told in controller.told:
        assert (told.step_seconds, told.phase_seconds, told.exchanges) == (0.0, {}, ())
        assert told.error_curves == {}


class Echo(Transport):
    """Answers each request with what it was given, and counts a byte for each element."""

    def __init__(self) -> None:
        self.worker, self.workers, self.sent_bytes = 0, 3, 0

    def fulfil(self, request: Any) -> Any:
        self.sent_bytes += sum(t.numel() for t in request.tensors)
        return list(request.tensors)


def talk(sizes: list[int]) -> Flow:
    for number, size in enumerate(sizes):
        tensors = (torch.zeros(size),)
        yield Mean(tensors) if number % 2 else Gather(tensors)


def test_a_real_account_keeps_the_latest_requests_if_asked() -> None:
    recording = Recording(Echo())
    recording.run(talk([5, 7]), CPU)
    assert recording.exchanges is None
    before = recording.seconds()
    recording.take()
    assert recording.seconds() == before  # which taking does not reset
    recording.exchanges = deque(maxlen=KEPT)
    recording.run(talk([*range(1, KEPT + 3)]), CPU)
    kept = list(recording.exchanges)
    assert len(kept) == KEPT
    assert [(r.messages, r.nbytes) for r in kept[-2:]] == [(2, KEPT + 1), (4, KEPT + 2)]
    assert all(record.seconds >= 0 for record in kept)
    assert recording.seconds()["communicate"] >= sum(r.seconds for r in kept)


def test_steps_are_timed_within_epochs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 100.0, 101.0, 150.0, 152.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StepClock()
    for step, epoch in enumerate((0, 0, 0, 1, 1)):
        clock.see(step, epoch)
    assert clock.take() == (4.0, 3)
    clock.resume()  # at 150, after a decision
    clock.see(5, 1)
    assert clock.take() == (2.0, 1)


class Behind(Peers):
    """Reading a mean waits 8 seconds for a device."""

    now = 0.0

    def _packed(self, rows: Iterable[Sequence[float]]) -> torch.Tensor:
        Behind.now += 8.0
        return torch.tensor(list(rows), dtype=torch.float64).mean(0)


@pytest.mark.parametrize(("device", "seconds"), [("cpu", [1, 1, 1, 1]), ("cuda", [9, 9, 5, 3])])
def test_steps_on_cuda_last_until_the_device_has_done_them(
    monkeypatch: pytest.MonkeyPatch, device: str, seconds: list[float]
) -> None:
    """The host takes a second for a step, and decides after 1, 2, 4 and 8 steps."""
    monkeypatch.setattr("time.perf_counter", lambda: Behind.now)
    asked, made = Asks(Needs(seconds=True)), training(None, workers=1)
    control, peers = ControlLoop(asked, made.workers), Behind(True, torch.device(device))
    control.attach()
    for _ in range(9):
        control.decide(0, [made.sgd], lambda: Moment({}), peers)
        made.step(np.ones((1, 4096)))
        Behind.now += 1.0
    assert [told.step_seconds for told in asked.told[1:]] == seconds


def test_validation_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second batch of an epoch of three, and after the third."""
    now = iter([0.0, 1.0, 3.0, 100.0, 104.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StepClock()
    clock.see(0, 0)
    clock.see(1, 0)
    clock.pause(2)
    clock.see(2, 0)
    clock.pause(3)
    clock.pause(3)  # as of another validation loader
    assert clock.take() == (7.0, 3)


def test_seconds_of_phases_are_of_the_steps_since_a_resume() -> None:
    """And of all steps since the decision where the same process begins a second fit."""
    asked, peers = Asks(Needs(seconds=True, link=True)), Peers(True, CPU, mean=lambda t: t)
    loops = []
    for _ in range(2):
        made = training(NetworkModel(0.01, 500.0))
        control = ControlLoop(asked, made.workers)
        control.attach()
        loops.append((made, control))
    (first, control), (second, resumed) = loops
    draw = np.random.default_rng(0)

    def steps(made: Training, count: int) -> None:
        for _ in range(count):
            made.step(draw.standard_normal((2, 4096)))

    control.decide(0, [first.sgd], lambda: Moment({}), peers)
    steps(first, 3)
    for old, new in zip(first.workers.engines, second.workers.engines, strict=True):
        new.load_state_dict(old.state_dict())
    resumed.load_state_dict(control.state_dict({}))
    for before, after in zip(control.statistics, resumed.statistics, strict=True):
        after.load_own_state(before.own_state())
    steps(second, 3)
    resumed.decide(1, [second.sgd], lambda: Moment({}), peers)

    first.ledger = Ledger(2, NetworkModel(0.01, 500.0))
    first.workers.start(first.ledger.pages, revocable=False)
    control.attach()
    steps(first, 3)
    control.decide(1, [first.sgd], lambda: Moment({}), peers)
    _, after_resume, after_second = asked.told
    assert after_resume.steps == after_second.steps == 6
    assert after_resume.wire_bytes == after_second.wire_bytes > 0
    expected = 500e-6 + 8 * after_second.wire_bytes / 6 / 1e7
    for told in (after_resume, after_second):
        assert told.phase_seconds["communicate"] == pytest.approx(expected)
    assert len(after_second.exchanges) == 6


def observation() -> Observation:
    return Observation(
        3,
        metrics={"loss": 0.1 + 0.2},
        step_metrics=("loss",),
        sizes={"w": 4},
        rates_ahead=(0.1, 1 / 3),
        levels={"w": None},
        error_curves={"w": Curve(2 / 3, (Point(0.1, 1e-9, 8),))},
        exchanges=(ExchangeRecord(1, 7.0, 1 / 7),),
        step_seconds=float("inf"),
    )


def test_a_trace_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    path, controller = tmp_path / "folder" / "trace.jsonl", Asks(Needs())
    append(path, observation(), {"a": [1.5]}, Decision(0.1, {"w": None}, "Because.", {"x": 1 / 3}))
    ((was, now),) = replay(controller, path)
    assert controller.told == [observation()]
    assert was == Decision(0.1, {"w": None}, "Because.", {"x": 1 / 3})
    assert now == Decision(0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda trace: BandwidthAware((0.5, 0.1, 0.01), step_seconds=0.01, every=4, trace=trace),
        lambda trace: CongestionAIMD(seconds=0.01, first=0.1, every=4, trace=trace),
    ],
)
def test_the_loop_writes_a_trace_that_replays(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "trace.jsonl"
    controller = make(str(path))
    run(training(NetworkModel(0.02, 100.0, schedule=((8, 0.001),))), controller, 16)
    pairs = list(replay(controller, path))
    assert len(pairs) > 4
    for was, now in pairs:
        assert json.dumps(asdict(was)) == json.dumps(asdict(now))
    assert len({was.level for was, _ in pairs}) > 1
    other = list(replay(Fixed(0.3), path))
    assert {now.level for _, now in other} == {0.3}


def test_another_controller_on_a_trace_has_its_own_state(tmp_path: Path) -> None:
    path, aware = tmp_path / "trace.jsonl", BandwidthAware((0.5, 0.1, 0.01), step_seconds=0.01)
    slow = Observation(0, exchanges=(ExchangeRecord(1, 1e6, 0.5),))
    for _ in range(3):
        append(path, slow, aware.init(), Decision(0.01))
    control = CongestionAIMD(seconds=0.05, first=0.1, down=0.5)
    now = [now.level for _, now in replay(control, path, another=True)]
    assert now == [0.05, 0.025, 0.0125]


def test_requests_of_a_network() -> None:
    network = NetworkModel(
        1.0, 100.0, latencies_us={"Gather": 30.0}, knee_bytes=1000, schedule=((5, 2.0), (9, 0.5))
    )
    assert hash(network) == hash(replace(network))
    rates = [network.link_at(step).gbps for step in (0, 4, 5, 8, 9, 99)]
    assert rates == [1, 1, 2, 2, 0.5, 0.5]
    record = network.request("Mean", 126_000, 3, 5)
    assert (record.messages, record.nbytes) == (4, 126_000)
    assert record.seconds == pytest.approx(4e-4 + 5e-4)
    assert network.request("Gather", 900, 3).seconds == pytest.approx(60e-6)
    assert network.request("Exchange", 10**9, 1).seconds == 0
    assert [messages_sent(kind, 4) for kind in ("Mean", "Gather", "Exchange")] == [6, 3, 3]
    draw = random.Random(0)
    for _ in range(20):  # a faster link is never slower
        nbytes = draw.uniform(0, 1e6)
        slow, fast = (
            NetworkModel(gbps, 10.0).request("Mean", nbytes, 4).seconds for gbps in (1, 2)
        )
        assert fast <= slow


def test_a_network_with_two_directions() -> None:
    home = NetworkModel(up_gbps=0.02, down_gbps=0.2, schedule=((5, 0.1), (9, (0.2, 0.02))))
    assert hash(home) == hash(replace(home))
    ups = [(link.gbps, link.down_gbps) for link in map(home.link_at, (0, 5, 9))]
    assert ups == [(0.02, 0.2), (0.1, 0.1), (0.2, 0.02)]
    assert home.request("Gather", 25_000, 4).seconds == pytest.approx(0.01)
    assert home.request("Gather", 2_500, 4, received=75_000).seconds == pytest.approx(0.003)
    assert home.request("Gather", 2_500, 4, 9, received=75_000).seconds == pytest.approx(0.03)
    # The server gets a message at one rate, and sends one back at the other.
    assert home.seconds(4, message_bytes=25_000) == pytest.approx(0.01 + 0.001)
    ring, gather = (replace(home, topology=name) for name in ("ring", "all_gather"))  # type: ignore[arg-type]
    assert ring.seconds(4, 25_000, 40_000) == pytest.approx(8 * 40_000 / 2e7)
    assert gather.seconds(4, 25_000) == pytest.approx(3 * 8 * 25_000 / 2e7)
    for name in get_args(get_type_hints(NetworkModel)["topology"]):
        one = NetworkModel(up_gbps=0.1, down_gbps=0.1, latency_us=30.0, topology=name)
        other = NetworkModel(0.1, 30.0, name)
        assert one.seconds(3, 1e6, 2e6) == other.seconds(3, 1e6, 2e6)


@pytest.mark.parametrize(
    ("lengths", "busiest"),
    [
        # Each sends its own message to all others, and receives the others'. In a ring it hands
        # on all but one of the messages.
        ([160, 16, 16, 16], {"Exchange": (3 * 160, 160 + 2 * 16), "Gather": (192, 192)}),
        ([16, 16, 16, 16], {"Exchange": (3 * 16, 3 * 16), "Gather": (3 * 16, 3 * 16)}),
    ],
)
def test_what_the_busiest_worker_sends_and_receives(
    lengths: list[int], busiest: dict[str, tuple[int, int]]
) -> None:
    transport = Simulated(4)
    payloads = [(torch.zeros(n, dtype=torch.uint8),) for n in lengths]
    made: dict[str, list[Request]] = {
        "Exchange": [Exchange((payload,) * 4) for payload in payloads],
        "Gather": [Gather(payload) for payload in payloads],
    }
    for kind, expected in busiest.items():
        transport.fulfil(made[kind])
        assert (transport.requested, transport.busiest) == (kind, expected)
    transport.fulfil([Mean((torch.zeros(8),)) for _ in range(4)])
    assert transport.busiest == (48, 48), "a ring"


def test_the_clock_of_a_simulation_knows_the_direction() -> None:
    """One worker sends ten times as much: at 20 kB a second up, or down."""
    long, short = (torch.zeros(n, dtype=torch.uint8) for n in (160_000, 16_000))
    for rates, seconds in (((16e-5, 1.0), 3 * 160 / 20), ((1.0, 16e-5), (160 + 2 * 16) / 20)):
        ledger = Ledger(4, NetworkModel(up_gbps=rates[0], down_gbps=rates[1]))

        def flow(own: torch.Tensor) -> Flow:
            yield Exchange(((own,),) * 4, (len(long),))

        ledger.run([flow(long), *(flow(short) for _ in range(3))], torch.device("cpu"))
        assert ledger.communicated == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"up_gbps": 0.02}, r"give bandwidth_gbps for both directions, or up_gbps and down_gbps"),
        ({"bandwidth_gbps": 1.0, "up_gbps": 0.02, "down_gbps": 0.2}, "for both directions, or"),
        (
            {"up_gbps": 0.0, "down_gbps": 0.2},
            r"up_gbps=0\.0\): .* bits/s must be above 0",
        ),
        ({"schedule": ((5, (1.0, 0.0)),)}, "above 0"),
        ({"knee_bytes": -1.0}, "bytes must be 0 or more"),
        ({"latencies_us": {"gather": 1.0}}, "kinds are Mean, Gather, Exchange"),
        ({"latencies_us": {"Mean": -1.0}}, "0 microseconds or more"),
        ({"schedule": ((5, 1.0), (3, 1.0))}, "in ascending order"),
        ({"schedule": ((5, 0.0),)}, "above 0"),
        ({"schedule": ((5, (1.0, 2.0, 3.0)),)}, "above 0"),
    ],
)
def test_networks_that_cannot_be(settings: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        NetworkModel(**settings)
