"""What a controller has decided, and what it has kept, is in force again after a resume."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_gc import PerParameter, TopK
from lightning_gc.control.control_loop import CONTROL_STATE, ControlLoop, Moment
from lightning_gc.controllers import Chain, Controller, Fixed, Observation, RoundSchedule
from lightning_gc.exchange import Workers
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.peers import Peers
from lightning_gc.lightning.for_pytorch_lightning import SimulatedLocalStepsStrategy
from lightning_gc.transports.simulated import Ledger
from tests.support.fitting import fit, unwarned

CPU = torch.device("cpu")
CONTROLLERS = [
    pytest.param(Chain(Fixed(0.3), RoundSchedule((2,)), at_epoch=1), (0.3, 2), id="keeps levels"),
    pytest.param(
        Chain(RoundSchedule((4,), levels=Fixed(0.3)), Fixed(0.3), at_epoch=1),
        (0.3, 4),
        id="keeps H",
    ),
]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 64)
        self.seen: list[tuple[float | None, int]] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        self.seen.append((strategy.levels()["net.weight"], strategy._rounds.every))
        return ((self.net(batch) - batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_and_save(controller: Controller, epochs: int, save: Path, resume: Any = None) -> Module:
    modules = []

    def module() -> Module:
        modules.append(Module())
        return modules[0]

    trainers = []

    class Keeps(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, _: Any) -> None:
            trainers.append(trainer)

    draw = torch.Generator().manual_seed(1)
    rows: Any = torch.randn(16, 64, generator=draw)
    data = torch.utils.data.DataLoader(rows, batch_size=2)
    strategy = SimulatedLocalStepsStrategy(TopK(0.01), workers=2, every=2, controller=controller)
    with unwarned():
        fit(strategy, module, data, resume=resume, max_epochs=epochs, callbacks=[Keeps()])
        trainers[0].save_checkpoint(save)  # when the fit is over
    return modules[0]


@pytest.mark.parametrize(("controller", "last"), CONTROLLERS)
def test_what_a_decision_keeps(controller: Controller, last: Any, tmp_path: Path) -> None:
    straight = fit_and_save(controller, 4, tmp_path / "straight.ckpt")
    fit_and_save(controller, 2, tmp_path / "half.ckpt")
    resumed = fit_and_save(controller, 4, tmp_path / "whole.ckpt", resume=tmp_path / "half.ckpt")
    assert set(resumed.seen) == {last}
    assert resumed.seen == straight.seen[-len(resumed.seen) :]
    assert torch.equal(resumed.net.weight, straight.net.weight)


def loop(controller: Controller) -> ControlLoop:
    workers = Workers(Compression(PerParameter(TopK(0.05))).configured("test"))
    workers.names = {nn.Parameter(torch.zeros(100, 10)): "w"}
    workers.start(Ledger(1).pages, revocable=False)
    control = ControlLoop(controller, workers)
    control.attach()
    return control


def decide(control: ControlLoop, epoch: int) -> None:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    control.decide(epoch, [sgd], lambda: Moment({}), Peers(True, CPU, mean=lambda tensor: tensor))


def test_a_state_of_before_a_decision_takes_the_decision_back() -> None:
    control = loop(Fixed(0.2))
    first = control.state_dict({})
    decide(control, 0)
    assert control._workers.levels() == {"w": 0.2}
    control.load_state_dict(first)
    assert control._workers.levels() == {"w": 0.05}
    assert control.state_dict({}) == first
    decide(control, 0)  # is due again
    assert control._workers.levels() == {"w": 0.2}


def test_it_is_told_until_an_epoch_has_ended() -> None:
    controller = Within(0.2)
    control = loop(controller)
    decide(control, 0)
    state = control.state_dict({"a": 1.0, "b": 2.0}, due=["b"])
    CONTROL_STATE.check(state)
    control.load_state_dict(state)
    again = control.state_dict({"c": 3.0})  # saved before the next decision
    assert (again["metrics"], again["due"]) == ({"a": 1.0, "b": 2.0, "c": 3.0}, ["b"])
    for step, epoch in ((1, 0), (2, 1), (3, 2)):
        control._workers.first.rounds.step = step
        decide(control, epoch)
    assert [each.resumed for each in controller.told] == [False, True, True, False]
    both, one = {"a": 1.0, "b": 2.0}, {"a": 1.0}
    assert [each.metrics for each in controller.told] == [{}, both, one, one]


@dataclass(frozen=True)
class Within(Fixed):
    """Remembers what it is told, after every step."""

    told: list[Observation] = field(default_factory=list)

    def every_steps(self, epoch: int) -> int:
        return 1

    def decide(self, observation: Any, state: Any) -> Any:
        self.told.append(observation)
        return super().decide(observation, state)
