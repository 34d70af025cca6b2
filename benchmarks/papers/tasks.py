"""What the experiments train: the demo's language model, and a small ResNet on digits.

Workers are simulated, in one process. Every run returns the same figures, among them the total
errors ``Σ‖x_t − C(x_t)‖²`` of every compressor, whether a memory keeps them or not.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import pytorch_lightning as pl  # noqa: E402
import torch  # noqa: E402
from images import Images, Photos, load, resnet  # noqa: E402
from shared import hush  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402
from tune_language_model import LanguageModel, Text  # noqa: E402

from lightning_gc import (  # noqa: E402
    CompressionMonitor,
    Identity,
    SimulatedDDPStrategy,
    Together,
)
from lightning_gc.compressors import Compressor  # noqa: E402
from lightning_gc.controllers import Controller  # noqa: E402
from lightning_gc.lightning.monitor.totals import ratio  # noqa: E402
from lightning_gc.memories import Memory  # noqa: E402
from lightning_gc.schemes import Scheme  # noqa: E402

Figures = dict[str, Any]
CLIP = 0.25  # of the language model
DECAY = 5e-4  # of the ResNet's weights


@dataclass(frozen=True)
class Method:
    """How gradients travel; memory and scheme are the compressor's own where none is named."""

    compressor: Compressor = Identity()  # noqa: RUF009 - frozen; bit-equal to plain DDP
    memory: Memory | None = None
    controller: Controller | None = None
    scheme: Scheme | None = None
    network: str = "10gbit"


class Watch(pl.Callback):
    """Keeps losses, errors and what validation logs. Stands after the monitor."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.errors = self.update_errors = self.inputs = self.path = 0.0
        self._rate, self._step = 0.0, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Have norms measured, and note the step's rate before a schedule changes it."""
        strategy: Any = trainer.strategy
        self._rate = trainer.optimizers[0].param_groups[0]["lr"]
        for engine in strategy.engines:
            engine.statistics.norms_wanted = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        """Add one worker's loss, and after a step the errors; stop a run that is lost."""
        strategy: Any = trainer.strategy
        # Lightning has divided the loss by the number of accumulated batches.
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        trainer.should_stop |= not math.isfinite(self.losses[-1])
        if strategy.engine.step == self._step:
            return
        self._step = strategy.engine.step
        norms = [torch.tensor(engine.statistics.norms) for engine in strategy.engines]
        before, after = (torch.cat(norms).double() ** 2).sum(0).tolist()  # over buckets
        self.inputs += before / len(norms)
        self.errors += after / len(norms)
        self.update_errors += self._rate**2 * after / len(norms)
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]  # clipped by now
        self.path += self._rate * float(nn.utils.get_total_norm(grads))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Keep what the epoch's validation and the monitor have logged."""
        figures = {n: float(value) for n, value in trainer.callback_metrics.items()}
        strategy: Any = trainer.strategy
        figures["level"] = statistics.median(
            [math.nan if level is None else level for level in strategy.levels().values()] or [0.0]
        )
        self.logged.append(figures)


class Classifier(pl.LightningModule):
    """The ResNet of examples/vision.py at a width of choice; SGD whose rate climbs and falls."""

    def __init__(
        self,
        images: Images,
        width: int,
        rate: float,
        epochs: int,
        momentum: float = 0.9,
        weight_decay: float = DECAY,
    ) -> None:
        super().__init__()
        self.net = resnet(images.channels, images.classes, width)
        self.rate, self.epochs = rate, epochs
        self.momentum, self.weight_decay = momentum, weight_decay
        self.accuracy = MulticlassAccuracy(images.classes, average="micro")
        self.loss = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy of an image."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a batch."""
        outputs = self.net(batch[0])
        self.accuracy.update(outputs, batch[1])
        self.loss.update(nn.functional.cross_entropy(outputs, batch[1]), len(batch[1]))
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", self.loss)

    def configure_optimizers(self) -> Any:
        """SGD with momentum; as in examples/vision.py, the rate falls at 60 % and 85 %."""
        sgd = torch.optim.SGD(
            self.parameters(), self.rate, self.momentum, weight_decay=self.weight_decay
        )
        falls = [int(share * self.epochs) for share in (0.6, 0.85)]

        def factor(epoch: int) -> float:
            return min(1.0, (epoch + 1) / 3) * 0.1 ** sum(epoch >= fall for fall in falls)

        return [sgd], [torch.optim.lr_scheduler.LambdaLR(sgd, factor)]


class Shared(Photos):
    """Images for simulated workers, who take batches in turn."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return all; the order is a new one in every epoch."""
        data = TensorDataset(self.images.train, self.images.train_labels)
        sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, seed=self.seed)
        return DataLoader(data, self.batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return all."""
        return DataLoader(TensorDataset(self.images.valid, self.images.valid_labels), 500)

    def _worker(self) -> int:
        strategy: Any = self.trainer.strategy if self.trainer is not None else None
        return int(strategy.worker)


@functools.cache
def pictures(path: Path | None = None) -> Images:
    """Return digits, or a file's images; those of training in the random order of stored runs."""
    images = load(path)
    order = torch.randperm(len(images.train), generator=torch.Generator().manual_seed(0))
    own = images.train[order], images.train_labels[order]
    return Images(*own, images.valid, images.valid_labels)


def words(cell: dict[str, Any], method: Method, folder: Path | None = None) -> Figures:
    """Train the demo's language model, on Python's documentation unless a folder is given.

    Args:
        cell: ``rate``, ``epochs``, ``hidden``, ``workers``, ``seed``; ``columns`` of all workers;
            ``dropout``, ``clip`` (0: none) and ``steps`` (of an epoch) where they differ.
        method: how gradients travel.
        folder: with train.txt, valid.txt and test.txt.
    """
    pl.seed_everything(cell["seed"], verbose=False)
    dropout, clip = cell.get("dropout", 0.3), cell.get("clip", CLIP)
    model = LanguageModel(cell["hidden"], cell["rate"], dropout=dropout, decay=True)
    data = Text(folder, batch=cell["columns"], bptt=35)
    extra = {"gradient_clip_val": clip or None, "limit_train_batches": cell.get("steps")}
    trainer, watch = fit(model, data, method, cell, extra)
    perplexity = watch.logged[-1]["validation_perplexity"] if watch.logged else math.inf
    loss = math.log(perplexity) if math.isfinite(perplexity) else math.inf
    return figures(trainer, watch, {"loss": loss, "perplexity": perplexity})


def photos(cell: dict[str, Any], method: Method) -> Figures:
    """Train the ResNet on digits.

    Args:
        cell: ``rate``, ``epochs``, ``width``, ``workers``, ``batch`` (of a worker), ``seed``;
            ``momentum``, ``weight_decay`` and ``steps`` of an epoch where they differ.
        method: how gradients travel.
    """
    pl.seed_everything(cell["seed"], verbose=False)
    images = pictures()
    sgd = {name: cell[name] for name in ("momentum", "weight_decay") if name in cell}
    model = Classifier(images, cell["width"], cell["rate"], cell["epochs"], **sgd)
    data = Shared(images, cell["workers"], cell["batch"], cell["seed"])
    steps = len(images.train) // (cell["workers"] * cell["batch"])
    steps = min(steps, cell.get("steps") or steps)
    trainer, watch = fit(model, data, method, cell, {"limit_train_batches": steps})
    last = watch.logged[-1] if watch.logged else {}
    found = {
        "accuracy": last.get("val_accuracy", 0.0),
        "loss": last.get("val_loss", math.inf),
        "course": [round(epoch["val_accuracy"], 4) for epoch in watch.logged],
    }
    return figures(trainer, watch, found)


def fit(
    model: pl.LightningModule,
    data: pl.LightningDataModule | DataLoader[Any],
    method: Method,
    cell: dict[str, Any],
    extra: dict[str, Any],
) -> tuple[pl.Trainer, Watch]:
    """Train on simulated workers, by the optimizer of the cell if it names one."""
    hush()
    if "optimizer" in cell:
        model.configure_optimizers = lambda: optimizer_of(cell, model)  # type: ignore[method-assign]
    watch = Watch()
    strategy = SimulatedDDPStrategy(
        method.compressor,
        method.memory,
        method.scheme,
        controller=method.controller,
        workers=cell["workers"],
        seed=cell["seed"],
        network=method.network,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[CompressionMonitor(), watch],
        max_epochs=cell["epochs"],
        num_sanity_val_steps=0,
        logger=pl.loggers.logger.DummyLogger(),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **extra,
    )
    trainer.fit(model, data)
    return trainer, watch


WORDS = 1000
"""Rows or columns from which on a matrix holds words, and is not Muon's."""


def optimizer_of(cell: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, AdamW, or Muon for the inner matrices and AdamW at 0.003 for the others."""
    rate, params = cell["rate"], [p for p in model.parameters() if p.requires_grad]
    if cell["optimizer"] == "sgd":
        return torch.optim.SGD(params, rate, momentum=cell.get("momentum", 0.0))
    if cell["optimizer"] == "adamw":
        return torch.optim.AdamW(params, rate)
    matrices = [p for p in params if p.ndim == 2 and max(p.shape) < WORDS]
    others = [p for p in params if p.ndim != 2 or max(p.shape) >= WORDS]
    muon = torch.optim.Muon(matrices, rate, adjust_lr_fn="match_rms_adamw")
    return Together([muon, torch.optim.AdamW(others, 0.003)])


def figures(trainer: pl.Trainer, watch: Watch, found: Figures) -> Figures:
    """Return what all runs have: quality first."""
    steps, last = trainer.global_step, watch.logged[-1] if watch.logged else {}
    strategy: Any = trainer.strategy
    sent = statistics.fmean(account.sent_bytes for account in strategy.recordings)  # of workers
    tail = watch.losses[-max(1, len(watch.losses) // 20) :]
    train_loss = sum(tail) / len(tail)

    def mean(name: str) -> float:
        """Return the mean over epochs, which all have as many steps."""
        seen = [epoch.get(f"compression_epoch/{name}", math.nan) for epoch in watch.logged]
        return statistics.fmean(seen) if seen else math.nan

    return found | {
        "train_loss": train_loss,
        "diverged": not train_loss < watch.losses[0],  # true of nan
        "total_error": watch.errors,
        "total_error_update": watch.update_errors,
        "path": watch.path,  # Σ γ·‖g‖, which is how far plain SGD has walked
        "relative_error": math.sqrt(watch.errors / watch.inputs) if watch.inputs else 0.0,
        "bytes": sent / max(steps, 1),
        "ratio": ratio(last.get("compression/total_dense_bytes", math.nan), sent),
        "density": mean("density"),
        "bits": mean("bits_per_element"),
        "levels": [e["level"] if math.isfinite(e["level"]) else None for e in watch.logged],
        "steps_done": steps,
    }
