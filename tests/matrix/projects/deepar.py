"""gluonts: its DeepAR estimator, which makes a Trainer by itself, on waves with noise."""

import copy
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from comparison import compare, last, seed, trainer_settings
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_gc.compressors import Compressor


class Ended(Callback):
    """Keeps the weights of the last step; the estimator puts back those of its best epoch."""

    network: nn.Module

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Copy them."""
        self.network = copy.deepcopy(module)


class Estimator(DeepAREstimator):  # type: ignore[misc]
    """Draws its windows once, so that a resumed run sees what the other one has seen."""

    def create_training_data_loader(
        self, data: Any, module: Any, **settings: Any
    ) -> Iterable[dict[str, Any]]:
        """Return the first batches, of windows that differ between workers."""
        seed(0)
        every = super().create_training_data_loader(data, module, **settings)
        return DataLoader(list(itertools.islice(every, 4)), batch_size=None)  # type: ignore[arg-type]


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for an epoch, or for two."""
    seed(0)
    draw = np.random.default_rng(0)
    series = [np.sin(np.arange(80) / 3 + k) + 0.1 * draw.standard_normal(80) for k in range(8)]
    start = pd.Period("2026-01-01", freq="h")
    data = ListDataset([{"start": start, "target": each} for each in series], freq="h")
    settings = trainer_settings(compressor, folder, stop, find_unused_parameters=True)
    settings["use_distributed_sampler"] = False  # each worker has drawn its own
    estimator = Estimator(
        freq="h",
        prediction_length=6,
        context_length=12,
        hidden_size=64,
        dropout_rate=0.1,
        batch_size=16,
        trainer_kwargs=settings,
    )
    ended = Ended()
    settings["callbacks"].append(ended)
    estimator.train_model(data, ckpt_path=last(folder, resume))
    return ended.network


if __name__ == "__main__":
    compare(fit)
