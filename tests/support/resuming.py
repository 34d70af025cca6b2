"""Fits that save, stop and go on, and what is left of them to compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gc.strategies.for_pytorch_lightning import CompressedDDPStrategy, CompressionMonitor
from tests.fits import Books, data, digest, numbers


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


class Stateful(DataLoader[Tensor]):
    """Goes on within an epoch, as torchdata's StatefulDataLoader does."""

    def __init__(self, loader: DataLoader[Tensor]) -> None:
        super().__init__(loader.dataset, batch_size=loader.batch_size)
        self.given, self.start = 0, 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        self.given = start
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]


class Crash(pl.Callback):
    """Ends the run before a step, as whatever may happen."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.step == self.step:
            raise Crashed


class Crashed(Exception):
    """What was to happen."""


def fit(
    worker: int,
    workers: int,
    folder: str,
    epochs: int,
    compressor: Any,
    resume: str | None = None,
    batches: int = 5,
    saving: dict[str, Any] | None = None,
    plugins: Any = None,
    accumulate: int = 1,
    stateful: bool = False,
    loud: int | None = None,
    crash: int = -1,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> dict[str, Any]:
    """Fit some epochs, saving at the end of each; return all that there is to compare.

    ``loud``: the step in which worker 1's batch is too large for float16; ``crash``: the step
    before which the run ends with an exception.
    """
    torch.manual_seed(0)
    model = Logged()
    strategy = CompressedDDPStrategy(compressor, process_group_backend="gloo", **options)
    saving = saving or {"save_top_k": -1, "save_on_train_epoch_end": True}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        plugins=plugins,
        callbacks=[
            CompressionMonitor(),
            Crash(crash),
            *callbacks,
            ModelCheckpoint(folder, "{epoch}-{step}", **saving),
        ],
    )
    loader = data(worker, batches * accumulate)
    if loud is not None and worker == 1:
        loader.dataset[16 * loud : 16 * (loud + 1)].mul_(1e4)  # type: ignore[index, attr-defined]
    loader = Stateful(loader) if stateful else loader
    try:
        trainer.fit(model, loader, data(worker, 2), ckpt_path=resume)
    except Crashed:
        return {}
    engine = strategy.engine
    assert engine is not None
    engine.loss_scaling.settle()
    return {
        "parameters": digest(model),
        "errors": {
            f"{name} {buffer}": kept.numpy().tobytes()
            for name, buffers in engine.state_dict()["memory"].items()
            for buffer, kept in buffers.items()
        },
        "levels": strategy.levels(),
        "controller": strategy.control_loop.state if strategy.control_loop else None,
        "totals": {n: float(v) for n, v in trainer.callback_metrics.items() if "compr" in n},
        "step": engine.step,
        "losses": model.losses,
        "local": numbers(model.local),
        "applied": numbers(model.applied),
        "error": numbers({n: e.double() for n, e in engine.errors().items()}),
        "skipped": model.skipped,
    }


SAME = ("parameters", "errors", "levels", "controller", "totals", "step")


def differences(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> list[str]:
    """Name what is not bit for bit the same; times are not expected to be."""
    found = []
    for worker, (a, b) in enumerate(zip(whole, resumed, strict=True)):
        for key in SAME:
            left, right = a[key], b[key]
            if key == "totals":
                left, right = (
                    {n: v for n, v in d.items() if "sec" not in n} for d in (left, right)
                )
            if left != right:
                found.append(f"worker {worker}: {key}")
    return found


def checkpoint(folder: Path, epoch: int, steps: int) -> str:
    return str(folder / f"epoch={epoch}-step={steps}.ckpt")


def timeless(totals: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in totals.items() if "seconds" not in name}
