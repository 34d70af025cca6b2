"""Trainers, strategies, callbacks and handles are copied during and after a fit, as without us."""

import copy
import importlib
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import (
    QSGD,
    CompressedDDPStrategy,
    CompressedFabricStrategy,
    CompressionMonitor,
    LocalSteps,
    LocalStepsStrategy,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
    TopK,
    attach,
)
from lightning_gc.controllers import Accordion
from tests.support.fitting import digest, quiet_trainer, unwarned
from tests.support.processes import run_in_processes, said

pytestmark = pytest.mark.processes

WAYS: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),  # noqa: S301
}
if importlib.util.find_spec("cloudpickle"):
    cloudpickle: Any = importlib.import_module("cloudpickle")
    WAYS["cloudpickle"] = lambda held: cloudpickle.loads(cloudpickle.dumps(held))

STRATEGIES: dict[str, Any] = {
    "compressed": lambda: CompressedDDPStrategy(
        TopK(0.2),
        controller=Accordion(low=0.2, high=0.1, interval=1),
        min_numel=0,
        process_group_backend="gloo",
    ),
    "local": lambda: LocalStepsStrategy(
        QSGD(4), every=4, delay=1, min_numel=0, process_group_backend="gloo"
    ),
    "simulated": lambda: SimulatedDDPStrategy(
        TopK(0.2),
        workers=2,
        controller=Accordion(low=0.2, high=0.1, interval=1),
        min_numel=0,
    ),
    "simulated local": lambda: SimulatedLocalStepsStrategy(
        QSGD(4), every=2, workers=2, min_numel=0
    ),
}


class Copies(Callback):
    """Copies the Trainer where an epoch ends, as an early stop by the user's own rule would."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for way in WAYS.values():
            assert way(trainer).global_step == trainer.global_step


def trained(strategy: str) -> Any:
    torch.manual_seed(0)
    simulated = strategy.startswith("simulated")
    trainer = quiet_trainer(
        STRATEGIES[strategy](),
        accelerator="cpu",
        devices=1 if simulated else 2,
        limit_train_batches=4,
        limit_val_batches=0,
        callbacks=[CompressionMonitor(), Copies()],
    )
    with unwarned():
        trainer.fit(BoringModel())
    return trainer


def go_on(trainer: Any, path: str) -> str:
    """Save, and train another epoch; return a digest of the weights."""
    trainer.fit_loop.max_epochs = 2
    with unwarned():
        trainer.save_checkpoint(path)
        torch.manual_seed(1)
        trainer.fit(trainer.lightning_module)
    return digest(trainer.lightning_module)


def copied(worker: int, strategy: str, path: str) -> None:
    trainer = trained(strategy)
    for held in (trainer.strategy, trainer.callbacks, trainer.strategy.controller):
        for way in WAYS.values():
            assert type(way(held)) is type(held)
    copies = [way(trainer) for way in WAYS.values()]
    assert len({go_on(each, path) for each in (*copies, trainer)}) == 1
    for each in copies:
        assert each.strategy is not trainer.strategy
        assert each.strategy.levels() == trainer.strategy.levels()


@pytest.mark.parametrize("strategy", ["compressed", "local"])
def test_copies_of_a_trainer_save_and_train_on(strategy: str, tmp_path: Path) -> None:
    """They end with the bits of the original, errors and controller among them."""
    run_in_processes(copied, 2, strategy, str(tmp_path / "saved.ckpt"))


@pytest.mark.parametrize("strategy", ["simulated", "simulated local"])
def test_copies_of_a_simulating_trainer_save_and_train_on(strategy: str, tmp_path: Path) -> None:
    with unwarned():  # torch warns of classes that a copied Trainer has
        copied(0, strategy, str(tmp_path / "saved.ckpt"))


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def handles(worker: int) -> list[str]:
    """Copy what a loop has, while it trains; return what a copied handle says."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    words = []

    def copy_all(handle: Any, *held: Any) -> None:
        for name, way in WAYS.items():
            copies = [way(each) for each in held]
            assert [type(each) for each in copies] == [type(each) for each in held], name
            words.append(said(lambda there: there.state_dict(), way(handle)))

    net = nn.Linear(32, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    ddp = DistributedDataParallel(net)
    controller = Accordion(low=0.2, high=0.1, interval=1)
    handle = attach(ddp, TopK(0.2), optimizers=optimizer, controller=controller, min_numel=0)
    handle.begin_epoch(0)
    step(ddp, optimizer)
    copy_all(handle, ddp, optimizer, controller)
    handle.close()
    copy_all(handle, ddp, optimizer)

    local = nn.Linear(32, 8)
    its = torch.optim.SGD(local.parameters(), 0.1, momentum=0.9)
    with LocalSteps(local, its, QSGD(4), every=2, min_numel=0) as rounds:
        step(local, its)
        copy_all(rounds, local, its)
        step(local, its)
    copy_all(rounds, local, its)

    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=CompressedFabricStrategy(TopK(0.2), process_group_backend="gloo", min_numel=0),
    )
    fabric.launch()
    wrapped, _ = fabric.setup(nn.Linear(32, 8), torch.optim.SGD(local.parameters(), 0.1))
    for way in WAYS.values():
        words.append(said(lambda there: there.handle.account(), way(fabric.strategy)))
    assert type(copy.deepcopy(wrapped)) is type(wrapped)
    return words


def test_copied_handles_say_what_they_lack() -> None:
    for words in run_in_processes(handles, 2):
        assert len(words) == 5 * len(WAYS)
        assert all("this is a copy of what trained" in each for each in words), words
