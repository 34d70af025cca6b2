"""A run that starts itself again when a worker dies, and goes on as if nothing had happened.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --fail-at 100

torchrun starts all workers anew when one fails; ``ckpt_path="last"`` makes them go on from the last
checkpoint, with the errors that every worker had. ``--fail-at`` has worker 1 killed once, to show
it. Run it again without, in another ``--out``: the last line is the same.

The variable is for torch: without it, restarted workers may find addresses of those before them
(https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from images import Photos, load
from pytorch_lightning.callbacks import ModelCheckpoint
from rich.console import Console
from shared import check_replicas, command_line, hush, option
from vision import Classifier
from vision import Settings as Vision

from lightning_gc import CompressedDDPStrategy, CompressionMonitor, TopK

hush()


@dataclass(frozen=True)
class Settings:
    """What can be chosen."""

    epochs: int = option(8, "passes through the training images")
    density: float = option(0.01, "share of the gradient that is sent")
    timeout: int = option(60, "seconds that a worker waits for another one")
    fail_at: int = option(-1, "step before which worker 1 is killed, the first time; -1: never")
    out: Path = option(Path("runs", "elastic"), "where checkpoints go")  # noqa: RUF009


class Trouble(pl.Callback):
    """What one would rather not have: worker 1 is gone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Kill this worker, in the first of torchrun's attempts."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and trainer.global_rank == 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    settings = Settings(**vars(command_line(__doc__, Settings).parse_args()))
    shared = Vision(epochs=settings.epochs)
    pl.seed_everything(shared.seed, verbose=False)
    data = Photos(load(None), shared.workers, shared.batch, shared.seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=shared.workers,
        strategy=CompressedDDPStrategy(
            TopK(settings.density), timeout=timedelta(seconds=settings.timeout)
        ),
        callbacks=[
            CompressionMonitor(),
            Trouble(settings.fail_at),
            ModelCheckpoint(settings.out, save_last=True, save_on_train_epoch_end=True),
        ],
        use_distributed_sampler=False,
        max_epochs=settings.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = Classifier(data.images, shared)
    trainer.fit(model, data, ckpt_path="last")
    check_replicas(trainer, model, "elastic")
    if trainer.is_global_zero:
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
        said = "all epochs had been trained before"
        if "val_accuracy" in figures:
            said = (
                f"accuracy {figures['val_accuracy']:.2%}, loss {figures['train_loss']:.9f}, "
                f"{figures['compression/total_wire_bytes']:,.0f} bytes"
            )
        Console(highlight=False, soft_wrap=True).print(f"attempt {attempt}: {said}")


if __name__ == "__main__":
    main()
