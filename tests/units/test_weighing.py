"""Weighing predicts steps from exchanges, and leaves the run as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, Identity, Menu, NetworkModel, PowerSGD, TopK
from lightning_gc.control.probes import Probes, StepClock
from lightning_gc.control.weighing import SAMPLE, weigh
from lightning_gc.controllers import Auto
from lightning_gc.core import Flow
from lightning_gc.exchange.peers import Peers
from lightning_gc.kernels.dispatch import HostFamilies
from lightning_gc.transports.accounting import KEPT
from lightning_gc.transports.simulated import Ledger
from tests.support.controlled_workers import CPU, Training

MENU = Menu({"topk": TopK(0.1), "powersgd": PowerSGD(2), "qsgd": QSGD(4), "dense": Identity()})


def training(network: NetworkModel | None = None) -> Training:
    made = Training(2, MENU, shape=(64, 64))
    made.ledger = Ledger(2, network)
    made.workers.accounts = made.ledger.pages
    draw = np.random.default_rng(0)
    for level in (None, 2, 1):
        made.workers.set_levels(level)
        made.step(draw.standard_normal((2, 4096)))
    return made


def everything(made: Training) -> str:
    engines = made.workers.engines
    found = [
        [engine.state_dict() for engine in engines],
        [vars(engine.tally).copy() for engine in engines],
        [engine.levels.requested() for engine in engines],
        torch.get_rng_state(),
        made.workers.layout,
    ]
    return json.dumps(found, default=lambda tensor: tensor.tolist())


def test_nothing_of_the_run_changes() -> None:
    made = training()
    before = everything(made)
    found = weigh(made.workers, Peers(True, CPU, timed=made.ledger.timed))
    assert everything(made) == before
    assert [choice.name for choice in found.candidates] == [*MENU.names, "uncompressed"]
    assert [choice.level for choice in found.candidates] == [1, 2, 3, 4, None]
    assert found.candidates[0].step_seconds == 0.0  # the present one
    assert found.seconds > 0


def test_simulated_workers_weigh_by_the_networks_model() -> None:
    """On a link of 10 kbit/s messages are all that counts, and their order is that of bytes."""
    made = training(NetworkModel(1e-5))
    found = weigh(made.workers, Peers(True, CPU, timed=made.ledger.timed))
    seconds = [choice.step_seconds for choice in found.candidates]
    assert seconds[:4] == sorted(seconds[:4])
    # Twice half of 4,096 values in four bytes each, and a flag's.
    uncompressed, topk = seconds[4] - seconds[0], seconds[MENU.names.index("topk")] - seconds[0]
    assert uncompressed == pytest.approx(8 * 4 * 4096 / 1e4, rel=0.2)
    assert topk < uncompressed


@pytest.mark.parametrize("rates", [(1e-5, 1e-4), (1e-4, 1e-5), (1e-5, 1e-5)])
def test_the_scheme_is_weighed_too(rates: tuple[float, float]) -> None:
    """Of four workers, two rounds send half of what an all-gather sends, whichever way is slow."""
    twice = {"in two rounds": TopK(0.1), "in one": TopK(0.1)}
    made = Training(4, Menu(twice, schemes={"in two rounds": "two_shot"}), shape=(64, 64))
    made.ledger = Ledger(4, NetworkModel(up_gbps=rates[0], down_gbps=rates[1]))
    made.workers.accounts = made.ledger.pages
    made.step(np.random.default_rng(0).standard_normal((4, 4096)))
    found = weigh(made.workers, Peers(True, CPU, timed=made.ledger.timed))
    seconds = {choice.name: choice.step_seconds for choice in found.candidates}
    assert seconds["in two rounds"] < seconds["in one"] - 1.0


def test_while_kernels_compile_nothing_is_weighed_and_the_seconds_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, answers = training(), iter([True, False])
    monkeypatch.setattr(HostFamilies, "compiling", property(lambda _: next(answers)))
    probes, peers = Probes(Auto(), made.workers), Peers(True, CPU, timed=made.ledger.timed)
    first, then = (probes.weighed(peers)["weighed"] for _ in range(2))
    assert first.candidates == ()
    assert [choice.name for choice in then.candidates] == [*MENU.names, "uncompressed"]
    assert min(first.seconds, then.seconds) > 0


class Told:
    """Times flows as a table says, in the order in which choices are weighed, twice each."""

    def __init__(self, table: Sequence[dict[str, float]]) -> None:
        twice = [row for row in table for _ in range(2)]
        self._left = iter([table[-1], *twice])

    def __call__(self, flows: Sequence[Flow]) -> dict[str, float]:
        for flow in flows:
            flow.close()
        return next(self._left)


def phases(compress: float, communicate: float, decode: float) -> dict[str, float]:
    return {"compress": compress, "communicate": communicate, "decode": decode}


TABLE = [phases(0.5, 0.1, 0.25), *[phases(0.25, 0.5, 0.25)] * 3, phases(0.0, 2.0, 0.0)]


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        # Both buckets' exchanges, one after the other: 3 parts of the gradient in all.
        ([0.0, 0.0], [3 * 0.85, *[3 * 1.0] * 3, 3 * 2.0]),
        # The second bucket, of one part, is ready when the first one has long been exchanged.
        ([0.0, 100.0], [100.85, *[101.0] * 3, 102.0]),
        # The first one, of two parts, is not yet: 2 * 2.0 + 2.0 for uncompressed ones.
        ([0.0, 2.0], [2.85, *[3.0] * 3, 6.0]),
    ],
)
def test_the_timeline_has_each_bucket_when_it_was_ready(
    ready: list[float], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without contention: a step lasts until the last bucket is there."""
    monkeypatch.setattr("lightning_gc.control.weighing._contention", lambda *_: 0.0)
    made = training()
    params = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(3)]
    made.workers.names = dict(zip(params, "abc", strict=True))
    made.workers.layout, made.workers.ready = [("a", "b"), ("c",)], list(ready)
    monkeypatch.setattr("lightning_gc.control.weighing.SAMPLE", 1)  # one tensor is enough
    found = weigh(made.workers, Peers(True, CPU, timed=Told(TABLE)))
    seconds = [choice.step_seconds for choice in found.candidates]
    assert seconds == pytest.approx([each - expected[0] for each in expected])


def test_a_part_of_whole_tensors_of_the_largest_bucket() -> None:
    made = training()
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in (10, SAMPLE // 2, SAMPLE, 7)]
    made.workers.names = dict(zip(params, "abcd", strict=True))
    made.workers.layout = [("a",), ("b", "c", "d")]
    sizes: list[int] = []

    def timed(flows: Sequence[Flow]) -> dict[str, float]:
        sizes.extend(flow.gi_frame.f_locals["grad"].numel() for flow in flows)  # type: ignore[attr-defined]
        return phases(0.1, 0.1, 0.1)

    weigh(made.workers, Peers(True, CPU, timed=timed))
    assert set(sizes) == {SAMPLE // 2 + SAMPLE}


def test_the_clock_keeps_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a step add up; validation, decisions and the ends of epochs are left out."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock(CPU)

    def see(at: float, step: int, epoch: int = 0) -> None:
        now[0] = at
        clock.see(step, epoch)

    see(0.0, 0)
    see(1.0, 0)  # accumulates
    see(3.0, 1)
    see(7.0, 2)
    now[0] = 50.0
    clock.resume()  # a decision took 43 seconds
    see(51.0, 3)
    now[0] = 53.0
    clock.pause(4)  # validation begins
    see(60.0, 4)
    see(64.0, 5)
    see(90.0, 6, epoch=1)
    assert clock.each() == (3.0, 4.0, 1.0, 2.0, 4.0)
    assert clock.each() == ()
    for step in range(7, 200):
        see(90.0 + step, step, epoch=1)
    assert len(clock.each()) == KEPT
