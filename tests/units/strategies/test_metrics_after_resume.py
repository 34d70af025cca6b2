"""After a resume a controller decides by this epoch's metrics, or is told that it has none."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_gc import PerParameter, TopK
from lightning_gc.controllers import Controller, Decision, DynamicBitWidth, Observation
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.fitting import fit, unwarned

STEPS = 4  # per epoch


@dataclass(frozen=True)
class Listens(Controller):
    """Remembers which metrics it is told after each epoch, and changes nothing."""

    told: dict[int, dict[str, float]] = field(default_factory=dict, repr=False)

    def init(self) -> dict[str, Any]:
        return {}

    def decide(
        self, observation: Observation, state: dict[str, Any]
    ) -> tuple[Decision, dict[str, Any]]:
        self.told[observation.epoch] = dict(observation.metrics)
        return Decision(None, keeps_levels=True), state


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = ((self.net(batch) - batch) ** 2).mean()
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", ((self.net(batch) - batch) ** 2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(controller: Controller, epochs: int, **settings: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    rows: Any = torch.randn(16, 8, generator=draw)
    data = torch.utils.data.DataLoader(rows, batch_size=2)
    strategy = SimulatedDDPStrategy(PerParameter(TopK(0.1)), workers=2, controller=controller)
    return fit(strategy, Module, data, data, max_epochs=epochs, **settings)


def saved(folder: Path, when: str) -> ModelCheckpoint:
    how: dict[str, dict[str, Any]] = {
        "epoch's end": {"save_on_train_epoch_end": True},
        "validation's end": {"save_on_train_epoch_end": False},
        "last batch": {"every_n_train_steps": STEPS},
    }
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1, **how[when])


@pytest.mark.parametrize("when", ["epoch's end", "validation's end", "last batch"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_told_are_this_epochs(when: str, epoch: int, tmp_path: Path) -> None:
    straight, resumed = Listens(), Listens()
    with unwarned():
        train(straight, 3, callbacks=[saved(tmp_path, when)])
        train(resumed, 3, resume=str(tmp_path / f"epoch={epoch}.ckpt"))
    told = resumed.told[epoch]
    assert told.items() <= straight.told[epoch].items()
    if when == "epoch's end":
        assert resumed.told == {e: m for e, m in straight.told.items() if e >= epoch}
    if when == "validation's end":
        assert set(told) == {"val_loss"}


@pytest.mark.parametrize("when", ["validation's end", "last batch"])
def test_a_run_goes_on_at_its_level_without_them(when: str, tmp_path: Path) -> None:
    steps = ((9.0, 0.1), (-1.0, 0.5))  # never reached
    controller = DynamicBitWidth(steps, monitor="val_loss", mode="min", loss_delta=9.0)
    with unwarned():
        train(controller, 2, callbacks=[saved(tmp_path, when)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = train(controller, 2, resume=str(tmp_path / "epoch=0.ckpt"))
    said = [str(each.message) for each in caught if "DynamicBitWidth" in str(each.message)]
    assert len(said) == 1
    assert "'train_loss'" in said[0]
    assert after["controller"] == controller.init()
    assert set(after["levels"].values()) == {0.1}


def test_a_metric_of_every_other_epoch_is_kept(tmp_path: Path) -> None:
    """As in a run without a stop, where Lightning keeps its last value."""
    straight, resumed = Listens(), Listens()
    with unwarned():
        train(straight, 4, callbacks=[saved(tmp_path, "epoch's end")], check_val_every_n_epoch=2)
        train(resumed, 4, resume=str(tmp_path / "epoch=1.ckpt"), check_val_every_n_epoch=2)
    assert resumed.told == {epoch: straight.told[epoch] for epoch in (1, 2)}
