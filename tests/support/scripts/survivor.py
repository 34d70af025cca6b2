"""A run to be killed at any moment: python survivor.py FOLDER. Goes on from the last epoch."""

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_gc import CompressedDDPStrategy, HardThreshold, PerParameter
from lightning_gc.controllers import TotalErrorBudget

EPOCHS, STEPS, TIMEOUT = 6, 25, timedelta(seconds=4)


class Model(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return (self.net(batch) - batch).square().mean()

    def on_train_start(self) -> None:
        part = self.folder / f"part{self.global_rank}"
        part.write_text(str(os.getpid()))
        part.rename(self.folder / f"pid{self.global_rank}")  # whole, or not there

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def train(folder: Path) -> str:
    """Train from the last checkpoint, if there is one; return what weights and errors add up to."""
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CompressedDDPStrategy(
            PerParameter(HardThreshold()),
            controller=TotalErrorBudget(0.1),
            process_group_backend="gloo",
            timeout=TIMEOUT,
        ),
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)],
    )
    data = torch.randn(2 * STEPS * 8, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(Model(folder), DataLoader(data, batch_size=8), ckpt_path="last")  # type: ignore[arg-type]
    strategy: Any = trainer.strategy
    digest = hashlib.sha256()
    for tensor in [*trainer.lightning_module.parameters(), *strategy.engine.errors().values()]:
        digest.update(tensor.detach().numpy().tobytes())
    return f"worker {trainer.global_rank} ended with {digest.hexdigest()}"


if __name__ == "__main__":
    sys.stdout.write(train(Path(sys.argv[1])) + "\n")
