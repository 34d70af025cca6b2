"""Lightning and Hydra: all objects are built from groups of YAML files, as project templates do."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from comparison import compare, last, seed, seeded_steps
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gc.compressors import Compressor

FILES = {
    "train.yaml": """
defaults: [_self_, model: mlp, data: digits, trainer: cpu, strategy: compressed, callbacks: last]
folder: ???
epochs: 2
""",
    "model/mlp.yaml": """
_target_: __main__.Classifier
net: {_target_: __main__.mlp, hidden: 128}
optimizer: {_target_: torch.optim.AdamW, _partial_: true, lr: 0.01}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1, gamma: 0.5}
""",
    "data/digits.yaml": "{_target_: __main__.Digits, batch_size: 16}",
    "trainer/cpu.yaml": """
_target_: lightning.pytorch.Trainer
accelerator: cpu
devices: 2
max_epochs: ${epochs}
logger: false
enable_progress_bar: false
enable_model_summary: false
num_sanity_val_steps: 0
gradient_clip_val: 1.0
accumulate_grad_batches: 2
""",
    "strategy/plain.yaml": """
_target_: lightning.pytorch.strategies.DDPStrategy
process_group_backend: gloo
""",
    "strategy/compressed.yaml": """
_target_: lightning_gc.CompressedDDPStrategy
compressor: ???
process_group_backend: gloo
""",
    "callbacks/last.yaml": """
checkpoint:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  dirpath: ${folder}
  save_last: true
  save_top_k: 0
""",
}


def mlp(hidden: int) -> nn.Module:
    """Return a classifier of vectors of 64."""
    body = nn.Sequential(nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(body, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


class Classifier(pl.LightningModule):
    """A module that is given its net, and how to make its optimizer and its schedule."""

    def __init__(self, net: nn.Module, optimizer: partial[Any], scheduler: partial[Any]) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss, and log it."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the accuracy."""
        x, y = batch
        self.log("val/acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Make both from what the files say."""
        optimizer = self.optimizer(params=self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer=optimizer)}


class Digits(pl.LightningDataModule):
    """Vectors whose largest of ten sums is their class."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.share = batch_size // 2  # of two workers

    def setup(self, stage: str | None = None) -> None:
        """Draw the data."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(128, 64, generator=draw)
        self.data = TensorDataset(x, (x @ torch.randn(64, 10, generator=draw)).argmax(1))

    def train_dataloader(self) -> Any:
        """Shuffle."""
        return DataLoader(self.data, batch_size=self.share, shuffle=True)

    def val_dataloader(self) -> Any:
        """Do not."""
        return DataLoader(self.data, batch_size=self.share)


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Write the files, compose them, build all objects, and train for an epoch, or for two."""
    configs = folder.parent.parent / f"configs{os.environ['RANK']}"
    for name, text in FILES.items():
        (configs / name).parent.mkdir(parents=True, exist_ok=True)
        (configs / name).write_text(text)
    chosen = [f"folder={folder}", f"epochs={1 if stop else 2}"]
    with hydra.initialize_config_dir(str(configs), version_base="1.3"):
        kind = "plain" if compressor is None else "compressed"
        config = hydra.compose("train", [*chosen, f"strategy={kind}"])
    if compressor is not None:
        target = {"_target_": f"lightning_gc.{type(compressor).__name__}"}
        config.strategy.compressor = target | vars(compressor)
    seed(0)
    module = hydra.utils.instantiate(config.model)
    trainer = hydra.utils.instantiate(
        config.trainer,
        strategy=hydra.utils.instantiate(config.strategy),
        callbacks=[*hydra.utils.instantiate(config.callbacks).values(), seeded_steps()],
    )
    data = hydra.utils.instantiate(config.data)
    # Its hyper-parameters hold partial functions, which torch loads only where it is told to.
    trainer.fit(module, data, ckpt_path=last(folder, resume), weights_only=False)
    network: nn.Module = module
    return network


if __name__ == "__main__":
    compare(fit)
