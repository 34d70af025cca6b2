"""A user's script, started by each launcher: python launch.py FLAVOUR START_METHOD STRATEGY."""

import importlib
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

FLAVOUR, START, NAME = sys.argv[1:4]
pl = importlib.import_module(FLAVOUR)

import lightning_gc  # noqa: E402 - the flavour comes first, as in the script of its user


class Model(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def on_train_start(self):
        assert not any(param.is_shared() for param in self.parameters()), "workers share weights"

    def on_train_end(self):
        flat = torch.cat([p.detach().view(-1) for p in self.parameters()])
        gathered = self.trainer.strategy.all_gather(flat)
        assert torch.equal(gathered[0], gathered[1]), "replicas differ"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    strategy: Any = NAME
    if START != "by-name":
        strategy = lightning_gc.CompressedDDPStrategy(
            NAME,
            start_method=START,  # type: ignore[arg-type]
            process_group_backend="gloo",
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[lightning_gc.CompressionMonitor()],
    )
    trainer.fit(Model(), DataLoader(torch.randn(64, 64), batch_size=8))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        ratio = float(trainer.callback_metrics["compression/total_ratio"])
        sys.stdout.write(f"ratio {ratio}\n")


if __name__ == "__main__":
    main()
