"""With the monitor a fit logs, stops and saves as without it, and has our figures besides."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loggers.logger import DummyLogger, Logger

from lightning_gc import CompressionMonitor, SimulatedDDPStrategy, TopK
from lightning_gc.controllers import Accordion
from tests.support.fitting import quiet_trainer, unwarned

OURS = "compression"


class Module(BoringModel):
    """Logs in each way that Lightning has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output: Any = super().training_step(batch, batch_idx)
        self.log("loss", output["loss"], on_step=True, on_epoch=True, prog_bar=True)
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output: Any = super().validation_step(batch, batch_idx)
        self.log("score", float(self.global_step), on_epoch=True)
        return output


class Notes(DummyLogger, Logger):
    """Logger that keeps all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))


class Reads(Callback):
    """Reads what callbacks of users read, wherever they do."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def _note(self, trainer: Any) -> None:
        metrics = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.read.append(
            [trainer.global_step, trainer.should_stop]
            + [{n: float(v) for n, v in each.items() if not n.startswith(OURS)} for each in metrics]
        )

    def on_train_batch_end(self, trainer: Any, *passed: Any) -> None:
        self._note(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer)


def fitted(folder: Path, *monitor: Any) -> tuple[Any, ...]:
    """Return what loggers and callbacks of the user's get, and what is ours of the former."""
    torch.manual_seed(0)
    logger, reads = Notes(), Reads()
    others = [
        reads,
        EarlyStopping("score", patience=1),
        LearningRateMonitor("step"),
        ModelCheckpoint(folder, monitor="score", save_top_k=1, every_n_train_steps=2),
    ]
    trainer = quiet_trainer(
        SimulatedDDPStrategy(
            TopK(0.2), workers=2, min_numel=0, controller=Accordion(low=0.2, high=0.1, interval=1)
        ),
        accelerator="cpu",
        max_epochs=6,
        limit_train_batches=4,
        limit_val_batches=1,
        log_every_n_steps=2,
        logger=logger,
        callbacks=[*monitor, *others],
    )
    with unwarned():
        trainer.fit(Module())
    theirs = [
        (step, {n: v for n, v in line.items() if not n.startswith(OURS)})
        for step, line in logger.lines
    ]
    ours = [name for _, line in logger.lines for name in line if name.startswith(OURS)]
    saved = sorted(each.name for each in folder.iterdir())
    theirs = [(step, line) for step, line in theirs if line]
    return (theirs, reads.read, saved, trainer.current_epoch), ours


def test_a_fit_logs_the_same_besides_our_figures(tmp_path: Path) -> None:
    """Lines of loggers and their steps, metrics as callbacks see them, the early stop, files."""
    alone, none = fitted(tmp_path / "alone")
    watched, ours = fitted(tmp_path / "watched", CompressionMonitor())
    assert watched == alone
    assert not none
    assert {f"{OURS}/ratio", f"{OURS}_epoch/ratio"} <= set(ours)
    assert alone[3] < 6  # it has stopped early
