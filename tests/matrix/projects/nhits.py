"""neuralforecast: its NHITS, which makes a Trainer by itself, on waves with noise."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from comparison import compare, seed, trainer_settings
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import NHITS
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_gc.compressors import Compressor


def waves() -> pd.DataFrame:
    """Return sixteen series of sixty hours."""
    draw = np.random.default_rng(0)
    series, hour = np.repeat(np.arange(16), 60), np.tile(np.arange(60), 16)
    value = np.sin(hour / 3 + series) + 0.1 * draw.standard_normal(960)
    times = pd.Timestamp("2026-01-01") + pd.to_timedelta(hour, unit="h")
    return pd.DataFrame({"unique_id": series.astype(str), "ds": times, "y": value})


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for an epoch of four steps, or for two; neuralforecast counts steps."""
    seed(0)
    settings = trainer_settings(compressor, folder, stop, "pytorch_lightning")
    settings["callbacks"][0] = ModelCheckpoint(folder, save_last=True, every_n_train_steps=4)
    if resume:  # its fit takes no path; with this callback Lightning finds the last checkpoint
        settings["callbacks"].append(OnExceptionCheckpoint(folder))
    model = NHITS(
        h=6,
        input_size=12,
        mlp_units=[[64, 64]] * 3,
        dropout_prob_theta=0.1,
        batch_size=2,
        windows_batch_size=16,
        num_lr_decays=0,  # it would share out max_steps among the decays
        max_steps=4 * settings.pop("max_epochs"),
        enable_checkpointing=True,
        **settings,
    )
    forecast = NeuralForecast([model], freq="h")
    with torch.serialization.safe_globals([MAE]):  # its checkpoints hold the loss as an object
        forecast.fit(waves())
    network: nn.Module = forecast.models[0]
    return network


if __name__ == "__main__":
    compare(fit)
