"""One language model, trained by two workers, with and without gradient compression.

    python examples/language_model.py                  # Python's own documentation, 5 minutes
    python examples/language_model.py --data ptb/      # train.txt, valid.txt, test.txt

An LSTM of two layers with tied embeddings learns an English text by SGD, once for every way to
exchange gradients. Compression is one argument of the Trainer, `strategy=CompressedDDPStrategy(...)`:
see `train`. Nothing in the model knows of it. `CompressionMonitor` counts the bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from text import Batches, Corpus, columns, load
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torchmetrics.text import Perplexity

from lightning_gc import (
    QSGD,
    CompressedDDPStrategy,
    CompressionMonitor,
    Compressor,
    HardThreshold,
    Identity,
    TopK,
)

# Here and in the workers, which import this file anew: results, not chatter.
logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)

METHODS: dict[str, Compressor] = {
    "dense": Identity(),  # bit-equal to plain DDP, so this is the baseline
    "topk": TopK(density=0.01),
    "hard_threshold": HardThreshold(0.01),
    "qsgd": QSGD(bits=4),
}


@dataclass(frozen=True)
class Settings:
    """What all methods have in common; the command line sets it."""

    workers: int
    epochs: int
    batch: int
    bptt: int
    hidden: int
    dropout: float
    learning_rate: float
    clip: float
    seed: int
    out: Path


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
        nn.init.zeros_(self.decoder.bias)
        self.perplexity = nn.ModuleDict({"validation": Perplexity(), "test": Perplexity()})
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``(columns, steps, words)``; the LSTM's state stays for the next call."""
        embedded = self.drop(self.embedding(inputs.t()))  # (steps, columns, hidden)
        output, (hidden, cell) = self.lstm(embedded, self.state)
        self.state = (hidden.detach(), cell.detach())
        logits: Tensor = self.decoder(self.drop(output)).transpose(0, 1)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy of a word."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a batch to the perplexity of all workers."""
        self._evaluate("validation", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a batch to the test perplexity."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        metric = self.perplexity[stage]
        metric.update(self(inputs), targets)
        self.log(f"{stage}_perplexity", metric, on_step=False, on_epoch=True)

    def _forget(self) -> None:
        self.state = None  # a text starts anew

    on_train_epoch_start = on_validation_epoch_start = on_test_epoch_start = _forget

    def configure_optimizers(self) -> Any:
        """SGD, its rate falling in a straight line to zero: alike for all methods."""
        sgd = torch.optim.SGD(self.parameters(), self.settings.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        line = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 1 / steps, total_iters=steps - 1)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": line, "interval": "step"}}


class Text(pl.LightningDataModule):
    """Gives every worker its own columns of the text."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        super().__init__()
        self.corpus, self.settings = corpus, settings

    def train_dataloader(self) -> Batches:
        """Return this worker's part of the training text."""
        return self._own(self.corpus.train)

    def val_dataloader(self) -> Batches:
        """Return this worker's part of the validation text."""
        return self._own(self.corpus.valid)

    def test_dataloader(self) -> Batches:
        """Return the whole test text as one column: every word has all words before it."""
        return Batches(columns(self.corpus.test, 1), self.settings.bptt)

    def _own(self, text: Tensor) -> Batches:
        assert self.trainer is not None
        per_worker = columns(text, self.settings.batch * self.settings.workers).split(
            self.settings.batch
        )
        return Batches(per_worker[self.trainer.global_rank], self.settings.bptt)


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
        if self.progress.console.is_terminal:
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
        weights = parameters_to_vector(pl_module.parameters()).detach()
        replicas = trainer.strategy.all_gather(weights).view(trainer.world_size, -1)
        if not all(torch.equal(replica, replicas[0]) for replica in replicas):
            raise RuntimeError(f"{self.name}: the workers' weights differ after training.")


def train(name: str, compressor: Compressor, corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """Train one model with one compressor and return its row of the table."""
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
    data = Text(corpus, settings)
    trainer = pl.Trainer(
        devices=settings.workers,
        strategy=CompressedDDPStrategy(compressor, seed=settings.seed, start_method="spawn"),
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
    tester = pl.Trainer(devices=1, **quiet)
    (test,) = tester.test(model, data, verbose=False)
    figures = {n: float(value) for n, value in trainer.callback_metrics.items()}
    wire, dense = (figures[f"compression_epoch/{kind}_bytes"] for kind in ("wire", "dense"))
    return {
        "name": name,
        "compressor": repr(compressor),
        "test_perplexity": test["test_perplexity"],
        "validation_perplexity": figures["validation_perplexity"],
        "wire_bytes_per_step": wire,
        "dense_bytes_per_step": dense,
        "ratio": dense / wire if wire else 1.0,
        "density": figures.get("compression_epoch/density", 1.0),
        "seconds_per_step": figures["seconds_per_step"],
        "replicas_identical": True,  # or `Report` would have raised
    }


def tabulate(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table to print."""
    table = Table("method", title="Test perplexity, and what one worker sends in one step")
    for heading in ("perplexity", "wire bytes", "ratio", "density", "seconds"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['test_perplexity']:.2f}",
            f"{row['wire_bytes_per_step']:,.0f}",
            f"{row['ratio']:.1f}",
            f"{row['density']:.3%}",
            f"{row['seconds_per_step']:.3f}",
        )
    return table


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw test perplexity against bytes; lower left is better."""
    from matplotlib.figure import Figure  # not needed in the workers, which import this file

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        x, y = row["wire_bytes_per_step"], row["test_perplexity"]
        axes.scatter(x, y, s=50)
        axes.annotate(
            row["name"], (x, y), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    axes.set_xscale("log")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    axes.set_xlabel("bytes sent per step and worker")
    axes.set_ylabel("test perplexity")
    figure.savefig(path, dpi=150)


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with train.txt, valid.txt, test.txt (also .gz)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    add("--rare", type=int, default=1, help="words seen this often or less become <unk>")
    add("--workers", type=int, default=2, help="processes")
    add("--epochs", type=int, default=6, help="passes through the training text")
    add("--batch", type=int, default=10, help="columns of text per worker")
    add("--bptt", type=int, default=35, help="words through which gradients flow back")
    add("--hidden", type=int, default=200, help="width of embedding and LSTM")
    add("--dropout", type=float, default=0.0, help="between layers")
    add("--learning-rate", type=float, default=20.0, help="of SGD, at the start")
    add("--clip", type=float, default=0.25, help="largest norm of a gradient")
    add("--seed", type=int, default=0, help="of weights, dropout and compressors")
    add("--out", type=Path, default=Path("runs/demo"), help="where results go")
    return parser


def main() -> None:
    """Train with every method, then write the table, the plot and the summary."""
    parser = arguments()
    options: Mapping[str, Any] = vars(parser.parse_args())
    settings = Settings(**{n: options[n] for n in Settings.__dataclass_fields__})
    try:
        corpus = load(options["data"], options["rare"])
        columns(corpus.valid, settings.batch * settings.workers)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    console.print(
        f"{len(corpus.train):,} words to train on, a vocabulary of {len(corpus.words):,}, "
        f"{settings.workers} workers, {settings.epochs} epochs"
    )
    rows = [train(name, METHODS[name], corpus, settings) for name in options["methods"]]
    console.print(tabulate(rows))
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "summary.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    plot(rows, settings.out / "perplexity_vs_bytes.png")
    console.print(f"Wrote {settings.out}/summary.json and perplexity_vs_bytes.png. Curves:")
    console.print(f"  tensorboard --logdir {settings.out}/tensorboard", highlight=False)


if __name__ == "__main__":
    main()
