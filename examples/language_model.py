"""One language model, trained by two workers, with and without gradient compression.

    python examples/language_model.py                  # Python's own documentation, 3.5 minutes
    python examples/language_model.py --data ptb/      # train.txt, valid.txt, test.txt

An LSTM of two layers with tied embeddings learns an English text by SGD, once for every way to
exchange gradients. All there is to compression is in `train`: a strategy and a callback for the
Trainer. Nothing in the model knows of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from perplexity_table import READING, plot, tabulate
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import Progress
from shared import check_replicas, command_line, hush, option
from text import Corpus, Text, load
from torch import Tensor, nn
from torchmetrics.text import Perplexity

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
from lightning_gc.controllers import Controller, TotalErrorBudget

hush()  # the workers import this file too, so this holds for them as well


@dataclass(frozen=True)
class Settings:
    """What all methods have in common."""

    workers: int = option(2, "processes")
    epochs: int = option(6, "passes through the training text")
    batch: int = option(5, "columns of text per worker")
    bptt: int = option(35, "words through which gradients flow back")
    hidden: int = option(128, "width of embedding and LSTM")
    dropout: float = option(0.3, "share of activations dropped between layers")
    learning_rate: float = option(20.0, "of SGD, at the start")
    clip: float = option(0.25, "greatest norm of a gradient")
    threshold: float = option(0.008, "of hard_threshold, in units of the gradient")
    budget: float = option(0.01, "average density for total_error")
    seed: int = option(0, "of weights, dropout and compressors")
    out: Path = option(Path("runs", "demo"), "where results go")  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch", "bptt", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1.")


def methods(settings: Settings) -> dict[str, tuple[Compressor, Controller | None]]:
    """Return what is compared. Biases go dense and errors are fed back where that is needed.

    Under a budget, which is of all elements, biases are compressed too.
    """
    return {
        "dense": (Identity(), None),  # bit-equal to plain DDP, so this is the baseline
        "topk": (TopK(density=0.01), None),
        "total_error": (PerParameter(HardThreshold()), TotalErrorBudget(settings.budget)),
        "qsgd": (QSGD(bits=4), None),
        "hard_threshold": (HardThreshold(settings.threshold), None),
    }


LONG = 18  # epochs


class LanguageModel(pl.LightningModule):
    """Predicts the next word: embedding, two LSTM layers, and the embedding again, transposed."""

    def __init__(self, words: int, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(words, settings.hidden)
        self.lstm = nn.LSTM(settings.hidden, settings.hidden, 2, dropout=settings.dropout)
        self.drop = nn.Dropout(settings.dropout)
        self.decoder = nn.Linear(settings.hidden, words)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.perplexity = Perplexity()
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``(columns, steps, words)``; the LSTM's state stays for the next call."""
        embedded = self.drop(self.embedding(inputs.t()))  # (steps, columns, hidden)
        output, (hidden, cell) = self.lstm(embedded, self.state)
        self.state = (hidden.detach(), cell.detach())
        logits: Tensor = self.decoder(self.drop(output)).transpose(0, 1)
        return logits

    def on_train_start(self) -> None:
        """Give every worker dropout masks of its own: Lightning has seeded all alike."""
        torch.manual_seed(self.settings.seed + self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy of a word."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.forward(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a batch; Lightning and torchmetrics bring the workers' shares together."""
        inputs, targets = batch
        self.perplexity.update(self.forward(inputs), targets)
        stage = "test" if self.trainer.testing else "validation"
        self.log(f"{stage}_perplexity", self.perplexity)

    test_step = validation_step

    def _forget(self) -> None:
        self.state = None  # the text starts anew
        # Spawned workers share the memory of a metric with the process that has spawned them,
        # until it is reset: without this, their first validation would be in the test's figure.
        self.perplexity.reset()

    on_train_epoch_start = on_validation_epoch_start = on_test_epoch_start = _forget

    def configure_optimizers(self) -> Any:
        """SGD, its rate falling in a straight line to zero: alike for all methods."""
        sgd = torch.optim.SGD(self.parameters(), self.settings.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        line = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 1 / steps, total_iters=steps - 1)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": line, "interval": "step"}}


class Report(pl.Callback):
    """Shows progress on worker 0 and puts what the table needs into ``callback_metrics``.

    Those come back from the workers to the process that called ``fit``; nothing else does but the
    weights. Stands after the monitor in the list of callbacks, for it reads the monitor's figures.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open a progress bar; where there is no terminal, only lines are written."""
        self.progress = Progress(transient=True, disable=not trainer.is_global_zero)
        steps = int(trainer.estimated_stepping_batches)
        self.bar = self.progress.add_task(f"{self.name:14}", total=steps)
        self.progress.start()

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self.started)
        self.progress.advance(self.bar)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write one line, and keep the epoch's figures: the table is about all epochs."""
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        prefix = "compression_epoch/"
        self.epochs.append({n: v for n, v in figures.items() if n.startswith(prefix)})
        if trainer.is_global_zero:
            self.progress.console.print(
                f"{self.name:14}  epoch {trainer.current_epoch + 1:2}  "
                f"validation perplexity {figures['validation_perplexity']:8.2f}  "
                f"bytes/step {figures[prefix + 'wire_bytes']:11,.0f}",
                highlight=False,
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Average over the epochs, and hold all replicas against worker 0's."""
        self.progress.stop()
        for name in self.epochs[0]:
            mean = statistics.mean(epoch[name] for epoch in self.epochs)
            trainer.callback_metrics[name] = torch.tensor(mean)
        trainer.callback_metrics["seconds_per_step"] = torch.tensor(statistics.median(self.seconds))
        check_replicas(trainer, pl_module, self.name)


def train(name: str, corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """Train one model with one method and return its row of the table."""
    compressor, controller = methods(settings)[name]
    logs = settings.out / "tensorboard"
    shutil.rmtree(logs / name, ignore_errors=True)  # or TensorBoard draws old runs and new as one
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": TensorBoardLogger(logs, name=name, version=""),
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    pl.seed_everything(settings.seed)
    model = LanguageModel(len(corpus.words), settings)
    data = Text(corpus, settings.workers, settings.batch, settings.bptt)
    trainer = pl.Trainer(
        devices=settings.workers,
        strategy=CompressedDDPStrategy(
            compressor, controller=controller, seed=settings.seed, start_method="forkserver"
        ),
        callbacks=[CompressionMonitor(), Report(name)],
        use_distributed_sampler=False,  # `Text` deals out the columns itself
        gradient_clip_val=settings.clip,
        max_epochs=settings.epochs,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        **quiet,
    )
    trainer.fit(model, data)
    # The final weights are back in this process: one process reads the whole test text, once.
    torch.set_num_threads(1)  # a single column is too little work to share
    tester = pl.Trainer(devices=1, **quiet)
    (test,) = tester.test(model, data, verbose=False)
    figures = {n: float(value) for n, value in trainer.callback_metrics.items()}
    return {
        "name": name,
        "compressor": repr(compressor),
        "controller": repr(controller),
        "test_perplexity": test["test_perplexity"],
        "validation_perplexity": figures["validation_perplexity"],
        "wire_bytes_per_step": figures["compression_epoch/wire_bytes"],
        "dense_bytes_per_step": figures["compression_epoch/dense_bytes"],
        "ratio": figures["compression/total_ratio"],
        "density": figures["compression_epoch/density"],
        "seconds_per_step": figures["seconds_per_step"],
        "replicas_identical": True,  # or `Report` would have raised
    }


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = command_line(__doc__, Settings)
    add = parser.add_argument
    add("--data", type=Path, help="folder with train.txt, valid.txt, test.txt (also .gz)")
    names = list(methods(Settings()))
    add(
        "--methods",
        nargs="+",
        choices=names,
        default=names[:-1],
        help="(default: all but the last)",
    )
    add("--long", action="store_true", help=f"{LONG} epochs of every method")
    if parser.parse_known_args()[0].long:
        parser.set_defaults(epochs=LONG, methods=names)
    return parser


def main() -> None:
    """Train with every method, then write the table, the plot and the summary."""
    parser = arguments()
    options = vars(parser.parse_args())
    data, names, _ = (options.pop(name) for name in ("data", "methods", "long"))
    try:
        settings = Settings(**options)
        methods(settings)  # what cannot be is said before anything is read
        corpus = load(data)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # Workers are forked from a process that has imported this file, and so start at once.
    multiprocessing.set_forkserver_preload([Path(__file__).stem])
    console = Console()
    console.print(f"{len(corpus.train):,} words to train on, {len(corpus.words):,} different ones")
    rows = [train(name, corpus, settings) for name in names]
    console.print(tabulate(rows))
    console.print(READING, highlight=False)
    (settings.out / "summary.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    plot(rows, settings.out / "perplexity_vs_bytes.png")
    console.print(f"Wrote {settings.out}/summary.json and perplexity_vs_bytes.png. Curves:")
    console.print(f"  tensorboard --logdir {settings.out}/tensorboard", highlight=False)


if __name__ == "__main__":
    main()
