"""Train the small transformer with AdamW on simulated workers, through Lightning's strategy.

Unlike transformer_runs.py this takes every memory, those that move weights among them.
"""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import tasks
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from transformer import LENGTH, Transformer
from tune_language_model import Text

CLIP = 1.0


class WordTransformer(pl.LightningModule):
    """Predicts the next word; rates warm up over 5 % of the steps and fall to zero in a cosine.

    Args:
        words: how many there are.
        rate: the largest learning rate.
        momentum: AdamW's β₁.
    """

    def __init__(self, words: int, rate: float, momentum: float) -> None:
        super().__init__()
        self.net = Transformer(words)
        self.rate, self.momentum = rate, momentum
        self.loss = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy of a word."""
        return self._cross_entropy(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a window."""
        self.loss.update(self._cross_entropy(batch))
        self.log("val_loss", self.loss)

    def _cross_entropy(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch  # (words, columns) each
        loss: Tensor = self.net(inputs.t(), targets.t())
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, β₂ = 0.999."""
        adam = torch.optim.AdamW(self.parameters(), self.rate, betas=(self.momentum, 0.999))
        steps = int(self.trainer.estimated_stepping_batches)
        warm = max(steps // 20, 1)
        line = torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: min((step + 1) / warm, (1 + math.cos(math.pi * step / steps)) / 2)
        )
        return {"optimizer": adam, "lr_scheduler": {"scheduler": line, "interval": "step"}}


def train(cell: dict[str, Any], method: tasks.Method) -> tasks.Figures:
    """Train on Python's documentation.

    Args:
        cell: ``rate``, ``momentum``, ``epochs``, ``columns`` of all workers, ``workers``, ``seed``;
            ``clip`` (0: none) and ``steps`` (of an epoch) where they differ.
        method: how gradients travel.
    """
    pl.seed_everything(cell["seed"], verbose=False)
    data = Text(None, batch=cell["columns"], bptt=LENGTH)
    model = WordTransformer(len(data.corpus.words), cell["rate"], cell["momentum"])
    extra = {
        "gradient_clip_val": cell.get("clip", CLIP) or None,
        "limit_train_batches": cell.get("steps"),
    }
    trainer, watch = tasks.fit(model, data, method, cell, extra)
    loss = watch.logged[-1].get("val_loss", math.inf) if watch.logged else math.inf
    return tasks.figures(trainer, watch, {"loss": loss})
