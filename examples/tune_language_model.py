"""A fair comparison on a language model: every method tuned by a study of its own.

    python examples/tune_language_model.py configs/demo.yaml                    # 15 minutes
    python examples/tune_language_model.py configs/thesis.yaml --data ptb/ --hidden 100 --workers 2

The text is Python's own documentation where no folder is given. Run the command again to go on
after an interruption; run it several times at once to share the work. Writes report.html.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table
from text import Corpus, columns, load
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gc.methods import yaml_config
from lightning_gc.methods.lightning_flavour import quiet_libraries
from lightning_gc.tuning import report, tune
from lightning_gc.tuning.comparison import Progress
from lightning_gc.tuning.experiment import load_experiment

read_once = functools.cache(load)


class LanguageModel(pl.LightningModule):
    """The thesis's LSTM: two layers, tied embeddings, no bias in the decoder, plain SGD.

    Args:
        hidden: width of embedding and LSTM.
        learning_rate: of SGD.
        dropout: share of activations dropped before, between and after the layers.
        decay: let the rate fall in a straight line to zero; constant in the thesis.
    """

    def __init__(
        self,
        hidden: int = 100,
        learning_rate: float = 20.0,
        dropout: float = 0.0,
        decay: bool = False,
    ) -> None:
        super().__init__()
        self.hidden, self.learning_rate, self.decay = hidden, learning_rate, decay
        self.lstm = nn.LSTM(hidden, hidden, 2, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.embedding: nn.Embedding | None = None
        self.loss = MeanMetric()
        # Each simulated worker reads columns of its own, and so has a state of its own.
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def configure_model(self) -> None:
        """Make the embedding: how many words there are is the data's to say."""
        if self.embedding is None:
            data: Any = self.trainer
            self.embedding = nn.Embedding(len(data.datamodule.corpus.words), self.hidden)
            limit = self.hidden**-0.5
            nn.init.uniform_(self.embedding.weight, -limit, limit)

    def forward(self, inputs: Tensor, worker: int) -> Tensor:
        """Return logits ``(steps, columns, words)`` for words ``(steps, columns)``."""
        assert self.embedding is not None
        embedded = self.drop(self.embedding(inputs))  # (steps, columns, hidden)
        output, (hidden, cell) = self.lstm(embedded, self.states.get(worker))
        self.states[worker] = (hidden.detach(), cell.detach())
        return nn.functional.linear(self.drop(output), self.embedding.weight)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy of a word."""
        return self._cross_entropy(batch, getattr(self.trainer.strategy, "worker", 0))

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Add a window."""
        self.loss.update(self._cross_entropy(batch, 0))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log exp of the mean over windows, which is the thesis's perplexity."""
        stage = "test" if self.trainer.testing else "validation"
        mean = float(self.loss.compute())
        self.log(f"{stage}_perplexity", math.exp(mean) if mean < 700 else math.inf)

    on_test_epoch_end = on_validation_epoch_end

    def _cross_entropy(self, batch: tuple[Tensor, Tensor], worker: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs, worker).flatten(0, 1), targets.flatten())

    def _forget(self) -> None:
        self.states.clear()  # the text starts anew
        self.loss.reset()

    on_train_epoch_start = on_validation_epoch_start = on_test_epoch_start = _forget

    def configure_optimizers(self) -> Any:
        """SGD, as plain as can be."""
        sgd = torch.optim.SGD(self.parameters(), self.learning_rate)
        if not self.decay:
            return sgd
        steps = int(self.trainer.estimated_stepping_batches)
        line = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 1 / steps, total_iters=steps - 1)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": line, "interval": "step"}}


class Windows:
    """Whole windows of a text in columns, cut into shares: one of each worker's in turn.

    Args:
        text: ``(columns, length)``.
        steps: words of a window.
        workers: how many share the columns.

    Raises:
        ValueError: the text is too short for one window.
    """

    def __init__(self, text: Tensor, steps: int, workers: int = 1) -> None:
        self.text, self.steps, self.workers = text, steps, workers
        if not len(self):
            raise ValueError(
                f"A text of {text.numel():,} words in {len(text)} columns has no window of {steps} "
                f"words. Take fewer columns (data.batch), shorter windows, or a longer text."
            )

    def __len__(self) -> int:
        return (self.text.shape[1] - 1) // self.steps * self.workers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self) // self.workers * self.steps, self.steps):
            window = self.text[:, start : start + self.steps + 1]
            for share in window.chunk(self.workers):
                yield share[:, :-1].t(), share[:, 1:].t()


class Text(pl.LightningDataModule):
    """A text in columns that the workers share: their number changes nothing but who reads what.

    Args:
        folder: with train.txt, valid.txt and test.txt; Python's own documentation if left out.
        batch: columns of all workers together.
        bptt: words through which gradients flow back.
    """

    def __init__(self, folder: Path | None = None, batch: int = 256, bptt: int = 35) -> None:
        super().__init__()
        # Words that occur once are too many in a small text; PTB's have been cut already.
        self.corpus: Corpus = read_once(folder, int(folder is None))
        self.batch, self.bptt = batch, bptt

    def train_dataloader(self) -> Windows:
        """Return the training text."""
        assert self.trainer is not None
        workers: int = getattr(self.trainer.strategy, "workers", 1)
        return Windows(columns(self.corpus.train, self.batch), self.bptt, workers)

    def val_dataloader(self) -> Windows:
        """Return the validation text, in as many columns."""
        return Windows(columns(self.corpus.valid, self.batch), self.bptt)

    def test_dataloader(self) -> Windows:
        """Return the test text in one column."""
        return Windows(columns(self.corpus.test, 1), self.bptt)


def tabulate(rows: Iterable[dict[str, str]]) -> Table:
    """Return the point of it all, to print: each method tuned, and with dense's settings."""
    headings = ("method", "test perplexity, tuned", "with dense's settings", "ratio of bytes")
    table = Table(*headings, title="Mean and standard deviation over seeds")
    for row in rows:
        cells = [row["method"]]
        for column in ("test", "test_with_dense_hyper_parameters"):
            mean, spread = row[column], row[f"{column}_spread"]  # one seed has no spread
            around = f" ± {float(spread):.1f}" if spread else ""
            cells.append("-" if mean in ("", "diverged") else f"{float(mean):.1f}{around}")
        # One worker sends nothing.
        table.add_row(*cells, f"{float(row['ratio'] or row['encoding_ratio'] or 1):.1f}")
    return table


def main() -> None:
    """Read the file, tune, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", type=Path, help="configs/demo.yaml or configs/thesis.yaml")
    add("--data", type=Path, help="folder with train.txt, valid.txt, test.txt (also .gz)")
    add("--hidden", type=int, help="100, 300 and 500 in the thesis (default: as in the file)")
    add("--workers", type=int, help="1, 2 and 4 in the thesis (default: as in the file)")
    add("--trials", type=int, help="per study (default: as in the file)")
    add("--storage", help="file or URL (default: runs/tune/<name>.journal)")
    add("--out", type=Path, help="folder for the report (default: runs/tune/<name>)")
    options = parser.parse_args()
    try:
        sections = yaml_config.read(options.config)
        if options.hidden is not None:
            sections["model"]["init_args"]["hidden"] = options.hidden
        if options.data is not None:
            sections["data"]["init_args"]["folder"] = str(options.data.resolve())
        text = "python" if options.data is None else options.data.resolve().name
        workers = options.workers or sections["tune"].get("workers", 1)
        name = (
            f"{options.config.stem}_{text}_h{sections['model']['init_args']['hidden']}_w{workers}"
        )
        changes = {"name": name, "workers": workers, "trials": options.trials}
        experiment, methods = load_experiment(sections, **changes)
        Text(options.data)  # a folder that lacks something is refused here
    except ValueError as error:
        parser.error(str(error))
    storage = options.storage or str(Path("runs", "tune", f"{name}.journal"))
    out = options.out or Path("runs", "tune", name)
    with Progress() as progress:
        tune(experiment, methods, storage, show=progress.show)
    report(storage, out, name)
    console = Console()
    with (out / "tables" / "results.csv").open(newline="") as file:
        console.print(tabulate(csv.DictReader(file)))
    console.print(f"Wrote {out}/report.html, report.md, plots/ and tables/.", highlight=False)


if __name__ == "__main__":
    quiet_libraries()
    main()
