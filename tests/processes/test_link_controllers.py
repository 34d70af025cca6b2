"""Controllers with clocks and curves in training: workers agree, and traces replay."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_gc import NetworkModel, PerParameter, PowerSGD, SimulatedDDPStrategy, TopK
from lightning_gc.control import probes
from lightning_gc.controllers import BandwidthAware, Controller, GainSearch, LayerBudget, Needs
from lightning_gc.controllers.trace import replay
from tests.support.fitting import ddp, fit, quiet_trainer, unwarned
from tests.support.models import Books, Plain, common_batches, own_batches
from tests.support.processes import run_in_processes
from tests.units.test_clocks import Asks

LADDER = (0.5, 0.25, 0.1)


def same(path: Path, controller: Controller) -> list[float | None]:
    """Return the levels of a trace, which replays bit for bit."""
    pairs = list(replay(controller, path))
    for was, now in pairs:
        assert json.dumps(asdict(was)) == json.dumps(asdict(now))
    return [was.level for was, _ in pairs]


def impatient(trace: str) -> BandwidthAware:
    """With a target that no step meets, so that it sends ever less, whatever the clock says."""
    return BandwidthAware(LADDER, step_seconds=1e-9, first=0.5, every=2, trace=trace)


def real(worker: int, trace: str) -> dict[str, Any]:
    strategy = ddp(PerParameter(TopK(0.5)), controller=impatient(trace))
    return fit(strategy, Books, own_batches(worker, 16), devices=2)


@pytest.mark.processes
def test_real_workers_follow_the_link_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    one, other = run_in_processes(real, 2, str(path))
    assert one["levels"] == other["levels"]
    assert set(one["levels"].values()) == {LADDER[-1]}
    assert one["digest"] == other["digest"]
    assert one["controller"] == other["controller"]
    levels = same(path, impatient(str(path)))
    assert levels[0] == LADDER[0]
    assert set(levels[2:]) == {LADDER[-1]}
    told = [json.loads(line)["observation"] for line in path.read_text().splitlines()]
    assert all(each["exchanges"] and each["step_seconds"] > 0 for each in told[1:])
    assert all(each["phase_seconds"]["communicate"] > 0 for each in told[1:])


def simulated(compressor: Any, controller: Controller, **more: Any) -> dict[str, Any]:
    strategy = SimulatedDDPStrategy(PerParameter(compressor), controller=controller, workers=2,
                                    **more)  # fmt: skip
    with unwarned():
        return fit(strategy, Books, common_batches(64, 4), max_epochs=3)


def test_simulated_workers_follow_a_scheduled_link(tmp_path: Path) -> None:
    """Fast for eight steps, then so slow that only the last level is in time."""
    path = tmp_path / "trace.jsonl"
    network = NetworkModel(1e3, schedule=((8, 1e-9),))
    aware = BandwidthAware(LADDER, step_seconds=10.0, first=0.25, every=2, trace=str(path))
    left = simulated(TopK(0.5), aware, network=network)
    assert set(left["levels"].values()) == {LADDER[-1]}
    levels = same(path, aware)
    assert levels[0] == 0.25
    assert max(levels[1:4], key=lambda level: level or 0.0) == LADDER[0]


@pytest.mark.parametrize(
    ("compressor", "controller"),
    [
        (PowerSGD(2), LayerBudget(reference=2, levels=(1, 2, 3))),
        (TopK(0.1), LayerBudget(reference=0.1, levels=(0.01, 0.1, 0.5), error=1.5)),
        (TopK(0.5), GainSearch(LADDER, gain=0.1)),
    ],
    ids=["ranks", "densities", "gain"],
)
def test_levels_by_error_curves_in_training(compressor: Any, controller: Controller) -> None:
    left = simulated(compressor, controller)
    allowed = controller.needs.curves
    assert left["levels"]
    assert set(left["levels"].values()) <= {*allowed, None}  # None: of that rank it would be more
    assert any(left["levels"].values())
    assert "No " not in left["reason"]


class Validating(Plain):
    """A batch takes a second by the clock that it sets, a validation 100."""

    now = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.now += 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.now += 100.0


def validated(worker: int) -> list[float]:
    controller, module = Asks(Needs(seconds=True)), Validating()
    clock = SimpleNamespace(perf_counter=lambda: module.now)
    settings: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 6, "val_check_interval": 2}
    trainer = quiet_trainer(ddp(TopK(0.1), controller=controller), devices=1, **settings)
    with unwarned(), mock.patch.object(probes, "time", clock):
        trainer.fit(module, own_batches(worker, 6), own_batches(worker, 1))
    return [told.step_seconds for told in controller.told if told.steps]


@pytest.mark.processes
def test_validation_within_an_epoch_is_no_part_of_a_step() -> None:
    (seconds,) = run_in_processes(validated, 1)
    assert set(seconds) == {1.0}
