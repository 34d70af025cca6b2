"""pytorch-forecasting: its Temporal Fusion Transformer, on waves with noise."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from comparison import compare, last, seed, trainer_settings
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss
from torch import nn

from lightning_gc.compressors import Compressor


def waves() -> TimeSeriesDataSet:
    """Return four series of forty steps."""
    draw = np.random.default_rng(0)
    time = np.tile(np.arange(40), 4)
    series = np.repeat(np.arange(4), 40)
    value = np.sin(time / 3 + series) + 0.1 * draw.standard_normal(160)
    frame = pd.DataFrame({"time": time, "series": series.astype(str), "value": value})
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=4,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for an epoch, or for two."""
    seed(0)
    data = waves()
    model = TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.01,
        hidden_size=32,
        attention_head_size=2,
        hidden_continuous_size=16,
        dropout=0.1,
        loss=QuantileLoss(),
        optimizer="adam",
        log_interval=-1,
    )
    settings = trainer_settings(compressor, folder, stop, find_unused_parameters=True)
    trainer = pl.Trainer(**settings, limit_train_batches=4, gradient_clip_val=0.1)
    loader = data.to_dataloader(train=True, batch_size=8, num_workers=0)
    # Its checkpoints hold the loss as an object, which torch loads only where it is told to.
    trainer.fit(model, loader, ckpt_path=last(folder, resume), weights_only=False)
    return model


if __name__ == "__main__":
    compare(fit)
