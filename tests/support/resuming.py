"""Fits that save, stop and go on, and what must be the same afterwards."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch.amp import GradScaler

from lightning_gc.checkpoint.side_files import FOLDER
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.support.accelerator import DEVICE
from tests.support.fitting import Crashed, ddp, fit
from tests.support.models import Books, GoesOn, own_batches
from tests.support.processes import run_in_processes


class Logged(Books):
    """Adam, if that may be, whose state must come back as well, a rate that falls, two metrics."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        try:
            self.trainer.strategy.memory.check_optimizer(optimizer.param_groups[0])  # type: ignore[attr-defined]
        except ValueError:  # the memory has the momentum
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Sharded(Logged):
    """Adam whose state is spread over the workers; each steps its share and broadcasts it."""

    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


class Crash(pl.Callback):
    """Ends the run before a step, as whatever may happen."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.step == self.step:
            raise Crashed


def fit_and_save(
    worker: int,
    workers: int,
    folder: str,
    epochs: int,
    compressor: Any,
    resume: str | None = None,
    batches: int = 5,
    saving: dict[str, Any] | None = None,
    plugins: Sequence[Any] = (),
    scaler: dict[str, Any] | None = None,
    accumulate: int = 1,
    stateful: bool = False,
    loud: int | None = None,
    crash: int = -1,
    callbacks: Sequence[Any] = (),
    strategy: Any = ddp,
    module: type[Logged] = Logged,
    **options: Any,
) -> dict[str, Any]:
    """Fit some epochs as one of several processes, saving at the end of each.

    Args:
        worker: which one.
        workers: of how many.
        folder: for checkpoints.
        epochs: to train.
        compressor: of the strategy.
        resume: the checkpoint to go on from.
        batches: steps of an epoch.
        saving: arguments of ``ModelCheckpoint`` instead of those that keep every epoch's.
        plugins: of the Trainer.
        scaler: arguments of a loss scaler, and so float16.
        accumulate: batches of a step.
        stateful: whether the data go on within an epoch.
        loud: the step in which the last worker's batch is too large for float16.
        crash: the step before which the run ends with an exception.
        callbacks: more of them.
        strategy: makes it of the compressor.
        module: what is trained.
        options: of the strategy.
    """
    if scaler is not None:
        plugins = [MixedPrecision("16-mixed", DEVICE, scaler=GradScaler(DEVICE, **scaler))]
    saving = saving or {"save_top_k": -1, "save_on_train_epoch_end": True}
    loader = own_batches(worker, batches * accumulate, loud if worker == workers - 1 else None)
    return fit(
        strategy(compressor, **options),
        module,
        GoesOn(loader.dataset, loader.batch_size) if stateful else loader,
        own_batches(worker, 2),
        resume,
        devices=workers,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        plugins=list(plugins),
        callbacks=[
            CompressionMonitor(),
            Crash(crash),
            *callbacks,
            ModelCheckpoint(folder, "{epoch}-{step}", **saving),
        ],
    )


def in_processes(workers: int, **options: Any) -> list[dict[str, Any]]:
    """Do so in that many processes, and return what each has left."""
    return run_in_processes(_with_options, workers, workers, options)  # type: ignore[no-any-return]


def _with_options(worker: int, workers: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit_and_save(worker, workers, **options)


SAME = ("digest", "memory", "levels", "controller", "rounds")


def differences(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> list[str]:
    """Name what is not bit for bit the same; times are not expected to be."""
    found = []
    for worker, (a, b) in enumerate(zip(whole, resumed, strict=True)):
        found += [f"worker {worker}: {key}" for key in SAME if a[key] != b[key]]
        if totals(a) != totals(b):
            found.append(f"worker {worker}: totals")
    return found


def totals(result: dict[str, Any]) -> dict[str, float]:
    """Return the monitor's figures, of the epoch and of the run."""
    return {name: value for name, value in result["metrics"].items() if "compression" in name}


def side_files(folder: Path) -> dict[str, Path]:
    """Return name -> side file beside the checkpoints, without the random name of the save."""
    files = sorted((folder / FOLDER).iterdir())
    return {re.sub(r"-[0-9a-f]{8}-(\d+|alone)-worker", "-worker", f.name): f for f in files}


def checkpoint(folder: Path, epoch: int, steps: int) -> str:
    return str(folder / f"epoch={epoch}-step={steps}.ckpt")
