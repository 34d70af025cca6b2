"""The thesis's medium LSTM on the Penn Treebank: dense against Top-k 50x, at the thesis's rates.

50x is the thesis's own count of density 1 %, in which a value and its index take 64 bits; the table
has the ratio of bytes beside it.

    python benchmarks/penn_treebank.py --data ptb/ --method dense --epochs 50
    python benchmarks/penn_treebank.py --data ptb/ --method topk_50x --epochs 50
    python benchmarks/penn_treebank.py --table

Each run writes a line per epoch as it goes, so that one that is cut short says how far it came, and
tests the weights of its best epoch; a file ``runs/penn_treebank/stop`` ends it after the epoch.
``--table`` writes what there is into a dated file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import optuna  # noqa: E402
import torch  # noqa: E402
from tune_language_model import LanguageModel  # noqa: E402, F401 - configs/thesis.yaml names it

from lightning_gc.compressors import Compressor  # noqa: E402
from lightning_gc.tuning import yaml_config  # noqa: E402
from lightning_gc.tuning.early_stopping import EarlyStopping  # noqa: E402
from lightning_gc.tuning.terminal_progress import quiet_libraries  # noqa: E402
from lightning_gc.tuning.training_run import fit  # noqa: E402

# Medians of the thesis's eight best runs, read off its figures 5.9 and 5.10.
RATES = {"dense": (28.0, 0.31), "topk_50x": (25.0, 0.31)}
# Table B.1, medium, one worker: test perplexity of the best of 60 runs, chosen on the test text.
PUBLISHED = {"dense": 92.213, "topk_50x": 89.597}
# Elements of the medium model's tensors: the embedding, and two layers of the LSTM.
SIZES = (10_000 * 300, *(1200 * 300, 1200 * 300, 1200, 1200) * 2)
RUNS = ROOT / "runs" / "penn_treebank"


def train(options: argparse.Namespace) -> None:
    """Train with one method and write its curve."""
    sections = yaml_config.read(ROOT / "configs" / "thesis.yaml")
    sections["data"]["init_args"]["folder"] = str(options.data.resolve())
    sections["trainer"] |= {"max_epochs": options.epochs, "precision": options.precision}
    experiment, methods = yaml_config.load(sections)
    method = next(method for method in methods if method.name == options.method)
    rate, dropout = RATES[options.method]
    trial = optuna.trial.FixedTrial({"model.learning_rate": rate, "model.dropout": dropout})
    stopping = EarlyStopping(experiment, method)
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / f"{options.method}.json"
    record: dict[str, Any] = {
        "command": f"--method {options.method} --epochs {options.epochs}",
        "ratios": ratios(method.make_compressor({})),
        "precision": options.precision,
        "threads": torch.get_num_threads(),
        "learning_rate": rate,
        "dropout": dropout,
        "validation": [],
        "seconds": [],
        "test": None,
    }
    began = time.perf_counter()

    def ask(figures: Any) -> bool:
        go_on = stopping.update(figures)
        record["validation"].append(stopping.curve[-1])
        record["seconds"].append(stopping.seconds[-1])
        path.write_text(json.dumps(record, indent=1))
        elapsed = time.perf_counter() - began
        print(f"epoch {len(stopping.curve)}: {stopping.curve[-1]:.2f}, {elapsed:.0f} s", flush=True)  # noqa: T201
        return go_on and not (RUNS / "stop").exists()

    record["test"] = fit(experiment, method, trial, ask, experiment.seed, final=True)
    path.write_text(json.dumps(record, indent=1))
    print(f"test {record['test']:.3f}")  # noqa: T201


def ratios(compressor: Compressor) -> dict[str, float]:
    """Return the density, the thesis's count of the ratio, and gradient over payload bytes."""
    density = 1.0 if compressor.level is None else compressor.level
    payload = sum(field.nbytes for size in SIZES for field in compressor.wire(size))
    counted = 1.0 if compressor.traits.exact else 32 / (64 * density)
    return {"density": density, "counted": counted, "bytes": 4 * sum(SIZES) / payload}


def tabulate() -> str:
    """Return what has been run, beside what the thesis says."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))}
    runs = {name: runs[name] for name in RATES if name in runs}
    old = [name for name, run in runs.items() if "ratios" not in run]
    if old:
        sys.exit(f"{RUNS}: {', '.join(old)} is from when densities were too high; run it again.")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "pytorch-lightning"))
    first = next(iter(runs.values()))
    lines = [
        f"# Penn Treebank, {datetime.date.today():%Y-%m-%d}",
        "",
        "`configs/thesis.yaml` at 300 units and one worker, seed 42, one run of each method by",
        "`python benchmarks/penn_treebank.py --data ptb/ --method NAME`. Rates are those that were",
        "read off the thesis's figures; nothing was tuned here.",
        f"{versions}, {os.cpu_count()} CPUs, precision {first['precision']}.",
        "",
        "| | " + " | ".join(runs) + " |",
        "|---|" + "---:|" * len(runs),
    ]
    rows: dict[str, list[str]] = {
        "density": [f"{r['ratios']['density']:g}" for r in runs.values()],
        "ratio, the thesis's count": [f"{r['ratios']['counted']:g}" for r in runs.values()],
        "ratio, gradient to payload bytes": [f"{r['ratios']['bytes']:.1f}" for r in runs.values()],
        "learning rate": [f"{r['learning_rate']:g}" for r in runs.values()],
        "dropout": [f"{r['dropout']:g}" for r in runs.values()],
        "epochs run (of 50 at most)": [str(len(r["validation"])) for r in runs.values()],
        "seconds per epoch, both at once": [f"{_mean(r['seconds']):.0f}" for r in runs.values()],
        "best validation perplexity": [f"{min(r['validation']):.2f}" for r in runs.values()],
        "in epoch": [str(1 + _least(r["validation"])) for r in runs.values()],
        "**test perplexity**": [_or_none(r["test"]) for r in runs.values()],
        "thesis, test perplexity": [f"{PUBLISHED[name]:.2f}" for name in runs],
    }
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    lines += ["", "Validation perplexity:", "", "| epoch | " + " | ".join(runs) + " |"]
    lines += ["|---:|" + "---:|" * len(runs)]
    longest = max(len(r["validation"]) for r in runs.values())
    for epoch in sorted({1, 2, 3, *range(5, longest + 1, 5), longest}):
        cells = [
            f"{r['validation'][epoch - 1]:.1f}" if epoch <= len(r["validation"]) else ""
            for r in runs.values()
        ]
        lines.append(f"| {epoch} | {' | '.join(cells)} |")
    lines += [
        "",
        "The thesis's figure is the best of 60 random draws, chosen on the test text, after up to",
        "50 epochs in float32. Nothing is sent: one worker, whose error feedback is what counts.",
    ]
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _least(values: list[float]) -> int:
    return values.index(min(values))


def _or_none(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.2f}"


def main() -> None:
    """Train, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with train.txt, valid.txt, test.txt")
    add("--method", choices=list(RATES), help="what to train with")
    add("--epochs", type=int, default=50, help="at most (default: %(default)s)")
    add("--precision", default="32-true", help="as for the Trainer (default: %(default)s)")
    add("--table", action="store_true", help="write benchmarks/results/penn_treebank_<date>.md")
    options = parser.parse_args()
    if options.table:
        text = tabulate()
        name = f"penn_treebank_{datetime.date.today():%Y%m%d}.md"
        (ROOT / "benchmarks" / "results" / name).write_text(text)
        print(text)  # noqa: T201
        return
    if options.data is None or options.method is None:
        parser.error("give --data and --method, or --table")
    quiet_libraries()
    train(options)


if __name__ == "__main__":
    main()
