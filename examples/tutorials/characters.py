"""A model that predicts the next character of Python's own documentation, and its text."""

from pydoc_data.topics import topics
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 16  # characters from which the next one is predicted


class Characters(LightningModule):
    """A perceptron of 168,320 parameters.

    Args:
        learning_rate: of SGD.
        decay: epochs after which the learning rate falls to a tenth; None: it does not.
    """

    def __init__(self, learning_rate: float = 0.25, decay: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.decay = learning_rate, decay
        self.net = nn.Sequential(
            nn.Embedding(128, 32),
            nn.Flatten(),
            nn.Linear(32 * CONTEXT, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of a batch, ``(rows, CONTEXT + 1)``, in nats."""
        (rows,) = batch
        return nn.functional.cross_entropy(self.net(rows[:, :-1]), rows[:, -1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss of rows that are not trained on."""
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss of rows that nothing is chosen by."""
        self.log("test_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """SGD, whose learning rate may fall once."""
        optimizer = torch.optim.SGD(self.parameters(), self.learning_rate)
        if self.decay is None:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, self.decay)]


class Text(LightningDataModule):
    """Rows of 17 characters, from what ``help("while")`` and the like print.

    Args:
        rows: to train on; half as many validate, and half as many test.
    """

    def __init__(self, rows: int = 12_800) -> None:
        super().__init__()
        text = "".join(topics.values()).encode("ascii", "ignore")[: 2 * rows * (CONTEXT + 1)]
        parts = torch.tensor(list(text)).view(-1, CONTEXT + 1).split([rows, rows // 2, rows // 2])
        self.training, self.validation, self.test = map(TensorDataset, parts)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return rows to train on: 64 per worker and step."""
        return DataLoader(self.training, 64, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return rows to validate with."""
        return DataLoader(self.validation, 640)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return rows to test with."""
        return DataLoader(self.test, 640)
