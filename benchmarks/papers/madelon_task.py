"""Logistic regression on madelon, with simulated workers: a task of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import tasks
import torch
from frame import Cell, Row
from logistic_regression import madelon as read_madelon
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    """Logistic regression."""

    def __init__(self, features: int, rate: float) -> None:
        super().__init__()
        self.net, self.rate = nn.Linear(features, 1, bias=False), rate
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean loss, with labels of ±1."""
        loss: Tensor = nn.functional.softplus(-batch[1] * self.net(batch[0]).squeeze(1)).mean()
        return loss

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), self.rate)


def regression(cell: Cell, method: tasks.Method, folder: Path) -> Row:
    """Train on madelon; the loss is that of all samples after the last step."""
    pl.seed_everything(cell["seed"], verbose=False)
    samples, labels = (part.float() for part in read_madelon(folder))
    samples = (samples - samples.mean(0)) / samples.std(0)
    model = Regression(samples.shape[1], cell["rate"])
    loader = DataLoader(TensorDataset(samples, labels), cell["batch"], shuffle=True, drop_last=True)
    steps = len(loader) // cell["workers"]
    extra = {"limit_train_batches": steps}
    trainer, watch = tasks.fit(model, loader, method, cell, extra)
    with torch.no_grad():
        loss = float(model.training_step((samples, labels), 0))
    return tasks.figures(trainer, watch, {"loss": loss})
