"""A small ResNet, trained by two workers, while a controller chooses the compression.

    python examples/vision.py --controller accordion      # handwritten digits, half a minute
    python examples/vision.py --controller total-error --data cifar10.npz

Between two epochs the controller looks at the last one and sets the level of the next one. All
there is to it is in `policies` and `main`. Writes summary.json and levels.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from images import Images, Photos, load, resnet
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import Progress
from shared import check_replicas, command_line, hush, option
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_gc import (
    QSGD,
    CompressedDDPStrategy,
    CompressionMonitor,
    HardThreshold,
    Identity,
    PerParameter,
    TopK,
)
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import (
    Accordion,
    Controller,
    DynamicBitWidth,
    Fixed,
    TotalError,
    TotalErrorBudget,
)

hush()  # the workers import this file too, so this holds for them as well
SPREAD: dict[str, Any] = {"min": min, "median": statistics.median, "max": max}


@dataclass(frozen=True)
class Settings:
    """What all controllers have in common, and what each of them may be told."""

    workers: int = option(2, "processes")
    epochs: int = option(20, "passes through the training images")
    batch: int = option(16, "images per worker and step")
    learning_rate: float = option(0.1, "of SGD, for 64 images a step in all")
    level: float = option(0.1, "density for fixed")
    low: float = option(0.1, "density for accordion in critical regimes")
    high: float = option(0.01, "density for accordion elsewhere")
    interval: int = option(2, "epochs between accordion's checks")
    patience: int = option(8, "epochs on one step before bitwidth lets go of compression")
    k_min: float = option(0.003, "density that total-error is to compete with")
    budget: float = option(0.02, "average density for total-error-budget")
    seed: int = option(0, "of weights, order of images and compressors")
    out: Path = option(Path("runs", "vision"), "where results go")  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1.")
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate {self.learning_rate}: must be above 0.")


def policies(settings: Settings) -> dict[str, tuple[Compressor, Controller | None]]:
    """Return a compressor and who turns its knob. Errors are fed back; small tensors go dense.

    But not under a threshold: a budget is of all elements, and the paper compresses every tensor.
    """
    s, every_tensor = settings, PerParameter(HardThreshold())
    return {
        "none": (Identity(), None),  # bit-equal to plain DDP, so this is the baseline
        "fixed": (TopK(s.level), Fixed(s.level)),
        "accordion": (TopK(s.low), Accordion(s.low, s.high, interval=s.interval)),
        "bitwidth": (QSGD(bits=4), DynamicBitWidth(patience=s.patience)),
        "total-error": (every_tensor, TotalError(k_min=s.k_min)),
        "total-error-budget": (every_tensor, TotalErrorBudget(s.budget)),
    }


class Classifier(pl.LightningModule):
    """Says what is on an image."""

    def __init__(self, images: Images, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.net = resnet(images.channels, images.classes)
        self.accuracy = MulticlassAccuracy(images.classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy of an image."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a batch; Lightning and torchmetrics bring the workers' shares together."""
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        """SGD with momentum; its rate climbs for two epochs and falls twice: alike for all."""
        rate = self.settings.learning_rate * self.settings.workers * self.settings.batch / 64
        sgd = torch.optim.SGD(self.parameters(), rate, momentum=0.9, weight_decay=5e-4)
        falls = [int(share * self.settings.epochs) for share in (0.6, 0.85)]

        def factor(epoch: int) -> float:
            return min(1.0, (epoch + 1) / 3) * 0.1 ** sum(epoch >= fall for fall in falls)

        return [sgd], [torch.optim.lr_scheduler.LambdaLR(sgd, factor)]


class Report(pl.Callback):
    """Shows progress on worker 0, which also writes ``summary.json``.

    Of spawned workers only ``callback_metrics`` and the weights come back, and what a controller
    did is more than that. Stands after the monitor in the list, for it reads the monitor's figures.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.epochs: list[dict[str, Any]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open a progress bar; where there is no terminal, only lines are written."""
        self.progress = Progress(transient=True, disable=not trainer.is_global_zero)
        self.bar = self.progress.add_task(self.name, total=int(trainer.estimated_stepping_batches))
        self.progress.start()

    def on_train_batch_end(self, *_: Any) -> None:
        """Move the bar."""
        self.progress.advance(self.bar)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the epoch's figures, and write one line of them."""
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        strategy: Any = trainer.strategy
        decision = strategy.control_loop.decision if strategy.control_loop is not None else None
        level = spread(strategy.levels())
        epoch = {
            "epoch": trainer.current_epoch,
            "accuracy": figures["val_accuracy"],
            "train_loss": figures["train_loss"],
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "level": level,
            "density": figures["compression_epoch/density"],
            "wire_bytes_per_step": figures["compression_epoch/wire_bytes"],
            "reason": decision.reason if decision else "There is no controller.",
            "figures": dict(decision.figures) if decision else {},
        }
        self.epochs.append(epoch)
        if trainer.is_global_zero:
            shown = " / ".join(f"{v:.3g}" for v in level.values()) if level else "uncompressed"
            self.progress.console.print(
                f"{self.name}  epoch {trainer.current_epoch + 1:2}  "
                f"accuracy {epoch['accuracy']:7.2%}  level {shown:24}  "
                f"bytes/step {epoch['wire_bytes_per_step']:9,.0f}  {epoch['reason']}",
                highlight=False,
                soft_wrap=True,
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hold all replicas against worker 0's, and write the summary."""
        self.progress.stop()
        check_replicas(trainer, pl_module, self.name)
        strategy: Any = trainer.strategy
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        summary = {
            "controller": self.name,
            "policy": repr(strategy.controller),
            "compressor": repr(strategy.compressor),
            "seed": self.settings.seed,
            "settings": asdict(self.settings),
            "accuracy": self.epochs[-1]["accuracy"],
            "wire_bytes_per_step": figures["compression/total_wire_bytes"] / trainer.global_step,
            "total_wire_bytes": figures["compression/total_wire_bytes"],
            "ratio": figures["compression/total_ratio"],
            # All epochs have equally many steps, so this is the average over the whole run.
            "density": statistics.mean(epoch["density"] for epoch in self.epochs),
            "replicas_identical": True,
            "epochs": self.epochs,
        }
        if trainer.is_global_zero:
            path = self.settings.out / self.name / "summary.json"
            path.write_text(json.dumps(summary, indent=2, default=str) + "\n")


def spread(levels: dict[str, float | None]) -> dict[str, float] | None:
    """Return least, median and greatest level of all parameters; None if none is compressed."""
    some = [level for level in levels.values() if level is not None]
    return {n: how(some) for n, how in SPREAD.items()} if some else None


def train(name: str, strategy: CompressedDDPStrategy, data: Photos, settings: Settings) -> None:
    """Train one model under one controller; `Report` writes the summary."""
    folder = settings.out / name
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # or old curves are drawn as well
    pl.seed_everything(settings.seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=settings.workers,
        strategy=strategy,
        callbacks=[CompressionMonitor(), Report(name, settings)],
        use_distributed_sampler=False,  # `Photos` deals out the images itself
        max_epochs=settings.epochs,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="tensorboard", version=""),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(data.images, settings), data)


def plot(summary: dict[str, Any], path: Path) -> None:
    """Draw level and accuracy over epochs; orange: uncompressed."""
    from matplotlib.figure import Figure  # not needed in the workers, which import this file

    epochs = [row["epoch"] + 1 for row in summary["epochs"]]
    levels = [row["level"] or {} for row in summary["epochs"]]
    least, middle, most = (
        [level.get(key, float("nan")) for level in levels] for key in ("min", "median", "max")
    )
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.fill_between(epochs, least, most, step="mid", alpha=0.25, label="least to greatest")
    above.step(epochs, middle, where="mid", label="median over parameters")
    for epoch in (e for e, level in zip(epochs, levels, strict=True) if not level):
        above.axvspan(epoch - 0.5, epoch + 0.5, color="tab:orange", alpha=0.3, lw=0)
    numbers = [number for level in levels for number in level.values()]
    far = bool(numbers) and max(numbers) > 9 * min(numbers)  # bits are not, thresholds are
    above.set(title=summary["controller"], ylabel="level", yscale="log" if far else "linear")
    above.legend(fontsize="small")
    below.plot(epochs, [100 * row["accuracy"] for row in summary["epochs"]], marker=".")
    below.set(xlabel="epoch", ylabel="validation accuracy, %")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = command_line(__doc__, Settings)
    add = parser.add_argument
    add("--data", type=Path, help="CIFAR-10 or the like as an .npz (default: digits)")
    names = list(policies(Settings()))
    add("--controller", choices=names, default="accordion", help="(default: accordion)")
    return parser


def main() -> None:
    """Train under one controller, then draw the plot."""
    parser = arguments()
    options = vars(parser.parse_args())
    path, name = options.pop("data"), options.pop("controller")
    try:
        settings = Settings(**options)
        compressor, controller = policies(settings)[name]
        strategy = CompressedDDPStrategy(
            compressor, controller=controller, seed=settings.seed, start_method="spawn"
        )
        data = Photos(load(path), settings.workers, settings.batch, settings.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    train(name, strategy, data, settings)
    folder = settings.out / name
    summary = json.loads((folder / "summary.json").read_text())
    plot(summary, folder / "levels.png")
    result = f"accuracy {summary['accuracy']:.2%}, {summary['ratio']:.1f} times fewer bytes"
    Console(highlight=False, soft_wrap=True).print(f"{name}: {result}. Plot and summary: {folder}")


if __name__ == "__main__":
    main()
