"""scvi-tools: SCVI, which makes a Trainer and a distributed sampler by itself, on random counts."""

from pathlib import Path
from typing import Any

import anndata
import numpy as np
import scvi
from comparison import compare, last, seed, trainer_settings
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_gc.compressors import Compressor


class Saving(Callback):
    """Saves each epoch; scvi-tools refuses Lightning's own callback for that."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "last.ckpt"

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Save, on all workers."""
        trainer.save_checkpoint(self.file)


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for an epoch, or for two."""
    draw = np.random.default_rng(0)
    cells = anndata.AnnData(draw.poisson(2.0, (128, 100)).astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    scvi.settings.seed = 0
    model = scvi.model.SCVI(cells, n_hidden=64)
    seed(0)
    settings = trainer_settings(compressor, folder, stop, find_unused_parameters=True)
    del settings["enable_model_summary"], settings["num_sanity_val_steps"]
    settings["callbacks"][0] = Saving(folder)
    model.train(
        batch_size=16,
        train_size=0.75,
        early_stopping=False,
        ckpt_path=last(folder, resume),
        **settings,
    )
    network: nn.Module = model.module
    return network


if __name__ == "__main__":
    compare(fit)
