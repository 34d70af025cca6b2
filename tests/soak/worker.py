"""What a worker does: trains a plan in a process of its own, and is hit by a fault on the way."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, Dataset

from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.soak.plan import EPOCHS, STEPS, Plan
from tests.support.fitting import arrays, fit, unwarned

PAUSE = 0.01  # seconds of a step, so that faults from outside find a run under way
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """Where a worker stands.

    Attributes:
        worker: its index.
        workers: of how many.
        port: at which worker 0 listens.
        folder: for checkpoints and progress.
        space: network namespace, or none.
    """

    worker: int
    workers: int
    port: int
    folder: Path
    space: str = ""


class Rows(Dataset[Tensor]):
    """Other rows for every worker; ``broken`` makes the next one raise."""

    broken = False

    def __init__(self, worker: int, count: int) -> None:
        self.rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(worker))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if self.broken:
            raise OSError("the data are gone")
        return self.rows[index]


class Model(pl.LightningModule):
    """Learns to double its input; with AdamW, unless the memory has the momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40))
        self.head = nn.Linear(40, 4)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.head(self.body(batch.to(self.dtype))) - batch[:, :4] * 2).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(PAUSE / self.trainer.accumulate_grad_batches)
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        try:
            self.trainer.strategy.memory.check_optimizer(optimizer.param_groups[0])  # type: ignore[attr-defined]
        except ValueError:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Progress(pl.Callback):
    """Writes the number of the step that begins; keeps the errors that the fit began with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.first = arrays(strategy.engine.errors())

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.path.write_text(str(trainer.global_step))


def train(place: Place, plan: Plan, fault: Any = None) -> dict[str, Any]:
    """Train from the newest checkpoint, if there is one; return what is left.

    Args:
        place: of this worker.
        plan: what to train.
        fault: what is to happen to this worker, if anything.
    """
    half = plan.precision == "16-mixed"
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=64.0))]
    rows = Rows(place.worker, 16 * STEPS * plan.accumulate)
    progress = Progress(place.folder / f"step{place.worker}")
    saving = ModelCheckpoint(place.folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    hit = fault and fault.callback()
    with unwarned():
        found = fit(
            plan.strategy(timeout=timedelta(seconds=plan.timeout)),
            Model,
            DataLoader(rows, batch_size=16),
            DataLoader(Rows(place.worker, 32), batch_size=16),
            newest(place.folder),
            devices=place.workers,
            max_epochs=EPOCHS,
            accumulate_grad_batches=plan.accumulate,
            use_distributed_sampler=False,
            callbacks=[CompressionMonitor(), progress, *filter(None, [hit]), saving],
            **({"plugins": plugins} if half else {"precision": plan.precision}),
        )
    return found | {"first errors": progress.first}


def epochs(folder: Path) -> dict[int, Path]:
    """Return epoch -> checkpoint, the oldest first."""
    named = ((re.fullmatch(r"epoch=(\d+)", path.stem), path) for path in folder.glob("*.ckpt"))
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def newest(folder: Path) -> str | None:
    """Return the checkpoint of the last epoch that has one."""
    found = epochs(folder)
    return str(found[max(found)]) if found else None


def run(pipe: Any, place: Place, plan: Plan, fault: Any) -> None:
    """Be a process: train, and send what is left, or what went wrong."""
    os.environ.update(
        MASTER_ADDR="10.77.0.1" if place.space else "127.0.0.1",
        MASTER_PORT=str(place.port),
        RANK=str(place.worker),
        LOCAL_RANK=str(place.worker),
        WORLD_SIZE=str(place.workers),
        NODE_RANK="0",
        OMP_NUM_THREADS="1",
    )
    if place.space:
        os.environ["GLOO_SOCKET_IFNAME"] = "gc0"
        with open(f"/var/run/netns/{place.space}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have ignored
    torch.set_num_threads(1)
    log = os.open(place.folder / f"log{place.worker}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        pipe.send(("ended", train(place, plan, fault)))
    except BaseException as error:
        pipe.send(("failed", f"{''.join(traceback.format_exception(error))}"))


def steps() -> Iterator[int]:
    """Yield the steps in which something may happen: all but the first two and the last."""
    yield from range(2, EPOCHS * STEPS - 1)
