"""Train the demo's language model with every compressor, at two learning rates each.

    python benchmarks/catalogue.py                            # the whole table
    python benchmarks/catalogue.py --methods topk sign_sgd    # the dense baseline is always there
    python benchmarks/catalogue.py --keep                     # go on after an interruption

Simulated workers, each method with its default memory and scheme and, where the demo has settings
for it, with these. Writes a dated table, its figures, and a plot of perplexity against bytes. A run
whose loss is no number, or ends above its start, has diverged and is marked so. Exits with 1 if a
method has diverged at both rates, or failed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import dated_page  # noqa: E402
import language_model  # noqa: E402
import pytorch_lightning as pl  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from pytorch_lightning.utilities.types import STEP_OUTPUT  # noqa: E402
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn  # noqa: E402
from shared import hush  # noqa: E402
from tune_language_model import LanguageModel, Text  # noqa: E402

from lightning_gc import COMPRESSORS, CompressionMonitor, SimulatedDDPStrategy  # noqa: E402
from lightning_gc.compressors import Compressor, Unbounded  # noqa: E402
from lightning_gc.methods import plot_style  # noqa: E402
from lightning_gc.methods.catalogue import written  # noqa: E402

RATES = (20.0, 8.0)
CLIP = 0.25
# Of methods whose result is a direction: a rate is what one step moves each weight by.
DIRECTION_RATES = (0.003, 0.0003)
DENSE = "identity"  # bit-equal to plain DDP


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        name: of the compressor, in the registry.
        rate: the learning rate at the start; it falls in a straight line to zero.
        epochs: passes through the text.
        steps: of an epoch, at most; 0: all.
        hidden: width of the model.
        workers: simulated ones.
        seed: of weights, dropout and compressors.
    """

    name: str
    rate: float
    epochs: int
    steps: int
    hidden: int
    workers: int
    seed: int


def compressor(name: str) -> Compressor:
    """Return the demo's instance where it has one, else the default instance."""
    chosen = language_model.methods(language_model.Settings())
    of_demo = {type(c): c for c, controller in chosen.values() if controller is None}
    return of_demo.get(COMPRESSORS[name], COMPRESSORS[name]())


def is_direction(compressor: Compressor) -> bool:
    """Return whether the result has another length than a gradient, as it declares."""
    return not compressor.traits.conserves or isinstance(compressor.bound(1), Unbounded)


class Losses(pl.Callback):
    """Keeps every step's loss, and stops a run that is lost."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look at the loss of one worker's batch."""
        assert isinstance(outputs, dict)
        # Lightning has divided it by the number of accumulated batches.
        self.kept.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        trainer.should_stop |= not math.isfinite(self.kept[-1])

    def diverged(self) -> bool:
        """Return whether the last twentieth is no better than the first step, or no number."""
        last = self.kept[-max(1, len(self.kept) // 20) :]
        return not last or not sum(last) / len(last) < self.kept[0]  # true of nan


def train(task: Task) -> dict[str, Any]:
    """Train once; return figures, or what went wrong."""
    torch.set_num_threads(1)  # the model is too small to share among threads
    torch.set_flush_denormal(True)  # saturated activations have gradients that take long
    hush()
    started = time.perf_counter()
    method = compressor(task.name)
    try:
        found = _fit(task, method)
    except Exception as error:  # one method's failure does not take the table away
        found = {"failed": f"{type(error).__name__}: {error}"}
    seconds = round(time.perf_counter() - started, 1)
    return {**asdict(task), "compressor": written(method), "seconds": seconds, **found}


def _fit(task: Task, method: Compressor) -> dict[str, Any]:
    pl.seed_everything(task.seed, verbose=False)
    model = LanguageModel(task.hidden, task.rate, dropout=0.3, decay=True)
    data, losses = Text(None, batch=5 * task.workers, bptt=35), Losses()
    strategy = SimulatedDDPStrategy(method, workers=task.workers, seed=task.seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[CompressionMonitor(), losses],
        max_epochs=task.epochs,
        limit_train_batches=task.steps or None,
        limit_val_batches=task.steps or None,
        gradient_clip_val=None if is_direction(method) else CLIP,
        num_sanity_val_steps=0,
        logger=pl.loggers.logger.DummyLogger(),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    perplexity = figures.get("validation_perplexity", math.inf)
    return {
        "perplexity": _finite(perplexity),
        "diverged": losses.diverged() or not perplexity < math.exp(losses.kept[0]),
        "losses": [_finite(losses.kept[0]), _finite(losses.kept[-1])],
        "steps_done": trainer.global_step,
        "bytes": figures["compression/total_wire_bytes"] / trainer.global_step,
        "ratio": figures["compression/total_ratio"],
        "kind": method.traits.kind,
        "direction": is_direction(method),
        "memory": written(strategy.memory),
        "scheme": None if strategy.scheme is None else written(strategy.scheme),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON knows no others


def run(tasks: list[Task], jobs: int, runs: Path, keep: bool) -> list[dict[str, Any]]:
    """Run what has to be, several at a time; a file each, so that an interruption costs little."""
    runs.mkdir(parents=True, exist_ok=True)
    rows: dict[Task, dict[str, Any]] = {}
    if keep:
        for path in runs.glob("*.json"):
            row = json.loads(path.read_text())
            rows |= {task: row for task in tasks if asdict(task).items() <= row.items()}
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeElapsedColumn())
    spawn = multiprocessing.get_context("spawn")
    with Progress(*columns) as progress, ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        bar = progress.add_task("runs", total=len(tasks), completed=len(rows))
        futures = {pool.submit(train, task): task for task in tasks if task not in rows}
        for future in as_completed(futures):
            task, row = futures[future], future.result()
            rows[task] = row
            (runs / f"{task.name}_{task.rate:g}.json").write_text(json.dumps(row))
            progress.console.print(
                f"{task.name:24} {task.rate:7g} {outcome(row):>9} {row['seconds']:5.0f} s",
                highlight=False,
                markup=False,
            )
            progress.advance(bar)
    return [rows[task] for task in tasks]


def main() -> int:
    """Run everything, print, write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=list(COMPRESSORS), default=list(COMPRESSORS), metavar="M")
    add("--epochs", type=int, default=3, help="of a run (default: %(default)s)")
    add("--steps", type=int, default=0, help="of an epoch, at most (default: all)")
    add("--hidden", type=int, default=128, help="width of the model (default: %(default)s)")
    add("--workers", type=int, default=2, help="simulated ones (default: %(default)s)")
    add("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--keep", action="store_true", help="take finished runs of these settings as they are")
    add("--runs", type=Path, default=Path("runs", "catalogue"), help="(default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--redraw", type=Path, metavar="JSON", help="draw these results' plot, run nothing")
    options = parser.parse_args()
    if options.redraw:
        draw(json.loads(options.redraw.read_text())["rows"], options.redraw.with_suffix(".svg"))
        return 0
    names = sorted({DENSE, *options.methods}, key=lambda name: (name != DENSE, name))
    shared = ("epochs", "steps", "hidden", "workers", "seed")
    settings = {name: getattr(options, name) for name in shared}
    tasks = [
        Task(name, rate, **settings)
        for name in names
        for rate in (DIRECTION_RATES if is_direction(compressor(name)) else RATES)
    ]
    rows = run(tasks, options.jobs, options.runs, options.keep)
    versions = dated_page.versions("lightning-gc", "torch")
    machine = f"Python {sys.version.split()[0]}, {versions}, {os.cpu_count()} CPUs"
    stem = dated_page.stem(options.out, "catalogue")
    text = page(rows, machine, f"{stem.name}.svg")
    dated_page.write(options.out, "catalogue", text, {"rows": rows})
    draw(rows, stem.with_suffix(".svg"))
    sys.stdout.write(f"{text}\nWrote {stem}.md, .json and .svg.\n")
    return int(any(all(map(lost, runs)) for runs in pairs(rows).values()))


Row = dict[str, Any]


def lost(row: Row) -> bool:
    """Return whether a run has nothing to show: it has failed or diverged."""
    return "failed" in row or bool(row["diverged"])


def outcome(row: Row) -> str:
    """Return a run's result in a word."""
    if "failed" in row:
        return "failed"
    return "diverged" if row["diverged"] else f"{row['perplexity']:.2f}"


def pairs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the runs of each method, in the order in which they came."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found


def best(runs: Sequence[Row]) -> Row | None:
    """Return the run of lowest perplexity, or None where all are lost."""
    return min((r for r in runs if not lost(r)), key=lambda r: float(r["perplexity"]), default=None)


def page(rows: Sequence[Row], machine: str, plot: str) -> str:
    """Return the dated file's text.

    Args:
        rows: of all runs, the dense baseline's first.
        machine: what it ran with.
        plot: the plot's file, beside this one.
    """
    first, seconds = rows[0], sum(row["seconds"] for row in rows) / len(rows)
    columns = ["method", "rates", "perplexity at each", "best", "bytes per step", "ratio"]
    lines = [[*columns, "memory", "diverged"]]
    lines.append(["---", *["---:"] * (len(columns) - 1), "---", "---"])
    for runs in pairs(rows).values():
        found = best(runs)
        shown = found or next((r for r in runs if "bytes" in r), {})
        how = [outcome(r) for r in runs if lost(r)]
        lines.append(
            [
                f"`{runs[0]['compressor']}`",
                " / ".join(f"{r['rate']:g}" for r in runs),
                " / ".join(map(outcome, runs)),
                outcome(found) if found else "none",
                f"{shown['bytes']:,.0f}" if shown else "",
                f"{shown['ratio']:.1f}" if shown else "",
                f"`{shown['memory']}`" if shown else "",
                f"yes: {', '.join(how)}" if how else "no",
            ]
        )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    failed = "".join(
        f"- {r['name']} at {r['rate']:g}: {r['failed']}\n" for r in rows if "failed" in r
    )
    limit = f", at most {first['steps']} steps each" if first["steps"] else ""
    return f"""{dated_page.title("Catalogue")}

`python benchmarks/catalogue.py` with {machine}.

The language model of `make demo` ({first["hidden"]} units) on Python's own documentation:
{first["workers"]} simulated workers, {first["epochs"]} epochs{limit}, seed {first["seed"]},
{seconds:.0f} s a run. Learning rates fall in a straight line to zero; gradients are clipped at a
norm of 0.25, but not where the result is a direction, whose rates are much smaller. The perplexity
is that of the validation text after the last epoch, and *best* is the better of the two, so none
is an unbiased estimate; nothing else was tuned, and one seed tells no difference of a few percent.
Bytes are one worker's, means over all steps of the better run. *Diverged* is a run whose loss was
no number, or at the end no lower than at the start, on the training or the validation text.

{table}

![Perplexity against bytes per step]({plot})
{f"{chr(10)}Failed:{chr(10)}{chr(10)}{failed}" if failed else ""}"""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the plot: a row per method, by bytes, with its better run's perplexity."""
    found = [run for runs in pairs(rows).values() if (run := best(runs)) is not None]
    found.sort(key=lambda run: (-run["bytes"], run["perplexity"]))

    def panels(figure: Figure) -> None:
        figure.set_size_inches(plot_style.WIDTH, 1.4 + 0.19 * len(found))
        left, right = figure.subplots(1, 2, sharey=True)
        for place, run in enumerate(found):
            colour = plot_style.colour_of(run["kind"], run["name"])
            left.plot(run["ratio"], place, "o", color=colour)
            right.plot(run["perplexity"], place, "o", color=colour)
        dense = next((run["perplexity"] for run in found if run["kind"] == "dense"), None)
        if dense is not None:
            right.axvline(dense, color=plot_style.MUTED, lw=1, ls="--")
        for kind, colour in plot_style.FAMILIES.items():
            left.plot([], [], "o", color=colour, label=kind)
        plot_style.plain_log(left.xaxis)
        plot_style.plain_log(right.xaxis)
        left.set(title="Times fewer bytes")
        right.set(title="Perplexity")
        left.set_yticks(range(len(found)), [run["name"] for run in found])
        left.invert_yaxis()
        left.margins(y=0.02)
        plot_style.legend(figure, 3)

    path.write_bytes(plot_style.svg(panels, "catalogue"))


if __name__ == "__main__":
    sys.exit(main())
