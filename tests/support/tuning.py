"""Tiny models with a known optimum, and the comparisons that tests make of them."""

import itertools
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gc.tuning import Experiment, comparison, failure_detector, tune
from lightning_gc.tuning.failure_detector import FailureDetector
from tests.support.fitting import unwarned

QUIET = {"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}


class Bowl(pl.LightningModule):
    """Its validation is (x − 0.3)², whatever it learns; it diverges where x is above ``cliff``."""

    def __init__(self, x: float = 0.5, cliff: float = 2.0, slope: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Linear(64, 64)
        self.x, self.cliff, self.slope = x, cliff, slope

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        value = self.value() + self.slope * self.current_epoch
        self.log("loss", math.nan if self.x > self.cliff else value, sync_dist=True)
        self.log("other", 1.0, sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", self.value() + 100)

    def value(self) -> float:
        return (self.x - 0.3) ** 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Denser(Bowl):
    """Its validation is least at density 0.1: half as good a decade away, on either side."""

    def value(self) -> float:
        level = getattr(self.trainer.strategy, "compressor", None)
        level = 0.1 if level is None or level.level is None else level.level
        return abs(math.log10(level) + 1)


class Data(pl.LightningDataModule):
    def rows(self) -> DataLoader[Any]:
        return DataLoader([torch.ones(64)] * 4, batch_size=2)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = rows


def bowl(trial: optuna.trial.BaseTrial) -> tuple[Any, Any]:
    return Bowl(trial.suggest_float("x", 0, 1)), Data()


def steep(trial: optuna.trial.BaseTrial) -> tuple[Any, Any]:
    """Gets worse from epoch to epoch."""
    return Bowl(trial.suggest_float("x", 0, 1), slope=1.0), Data()


def cliff(trial: optuna.trial.BaseTrial) -> tuple[Any, Any]:
    return Bowl(trial.suggest_float("x", 0, 1), cliff=0.5), Data()


def denser(trial: optuna.trial.BaseTrial) -> tuple[Any, Any]:
    return Denser(), Data()


def experiment(build: Any = bowl, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "trials": 4,
        "sampler": "random",
        "seeds": (0,),
        "trainer": QUIET,
        "workers": 2,
    }
    settings |= {"test_metric": "test"}
    return Experiment("toy", build, metric="loss", **settings | changes)


def compare(
    storage: Path | str, *methods: Any, build: Any = bowl, finals: bool = False, **changes: Any
):
    with unwarned():
        return tune(experiment(build, **changes), methods, storage, finals)


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a heartbeat's time pass between any two looks at other processes."""
    clock = itertools.count(0.0, failure_detector.HEARTBEAT).__next__
    monkeypatch.setattr(comparison, "FailureDetector", lambda: FailureDetector(clock))
    monkeypatch.setattr(comparison, "_PAUSE", 0.0)


def work(worker: int, path: str, trials: int, folder: Path, meetings: int, dies: bool) -> list[int]:
    """Be one of two processes that share a study; return the numbers of the trials that it made.

    Args:
        worker: 0 or 1.
        path: where the study is.
        trials: how many there are to be.
        folder: where the two can see how far the other one is.
        meetings: how many trials of each are begun together.
        dies: whether it dies in the last of these.
    """
    done: list[int] = []
    begun = 0

    def show(event: Any) -> None:
        if event.kind == "trial":
            done.append(int(event.text.split()[1]))

    def build(trial: optuna.trial.BaseTrial) -> tuple[Any, Any]:
        nonlocal begun
        begun += 1
        if begun <= meetings:
            (folder / f"{worker} has begun {begun}").touch()
            while not (folder / f"{1 - worker} has begun {begun}").exists():
                time.sleep(0.01)
        if dies and begun == meetings:
            os.kill(os.getpid(), signal.SIGKILL)
        return bowl(trial)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with unwarned():
        tune(experiment(build, trials=trials), [], path, finals=False, show=show)
    return done
