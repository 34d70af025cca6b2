"""The thesis's LSTM on the Penn Treebank, at its own rates: cells of its Table B.1, full size.

Of the medium model dense against Top-k 50x, of the small one dense and each method at its highest
ratio. 50x is the thesis's own count of density 1 %, in which a value and its index take 64 bits;
the table has the ratio of bytes beside it.

    python benchmarks/papers/penn_treebank.py --data ptb/ --method dense --epochs 50
    python benchmarks/papers/penn_treebank.py --data ptb/ --method topk_50x --epochs 50
    python benchmarks/papers/penn_treebank.py --data ptb/ --size small --method dgc_5000x
    python benchmarks/papers/penn_treebank.py --table --size small

Each run writes a line per epoch as it goes, so that one that is cut short says how far it came, and
tests the weights of its best epoch; a file ``runs/penn_treebank/stop`` ends it after the epoch.
``--table`` writes what there is into a dated file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import dated_page  # noqa: E402
import optuna  # noqa: E402
import torch  # noqa: E402
from tune_language_model import LanguageModel  # noqa: E402, F401 - configs/thesis.yaml names it

from lightning_gc.compressors import Compressor  # noqa: E402
from lightning_gc.methods import yaml_config  # noqa: E402
from lightning_gc.methods.lightning_flavour import quiet_libraries  # noqa: E402
from lightning_gc.tuning.early_stopping import EarlyStopping  # noqa: E402
from lightning_gc.tuning.experiment import load_experiment  # noqa: E402
from lightning_gc.tuning.trial import fit  # noqa: E402

UNITS = {"small": 100, "medium": 300}
# Size, method -> rate and dropout: medians of the thesis's eight best runs, read off its figures
# 5.9, 5.10 and B.6. It shows no dropout of the small model, and no rate of its QSGD: the medium
# model's dropout and dense's rate stand for them, and 0.5 for DGC's momentum, shown of none.
RATES = {
    ("medium", "dense"): (28.0, 0.31),
    ("medium", "topk_50x"): (25.0, 0.31),
    ("small", "dense"): (18.0, 0.31),
    ("small", "topk_5000x"): (22.0, 0.29),
    ("small", "dgc_5000x"): (22.0, 0.14),
    ("small", "qsgd_3_bits"): (18.0, 0.44),
}
MOMENTUM = 0.5
# Table B.1, one worker: test perplexity of the best of 60 runs, chosen on the test text.
PUBLISHED = {
    ("medium", "dense"): 92.213,
    ("medium", "topk_50x"): 89.597,
    ("small", "dense"): 116.398,
    ("small", "topk_5000x"): 169.623,
    ("small", "dgc_5000x"): 166.213,
    ("small", "qsgd_3_bits"): 115.717,
}
RUNS = ROOT / "runs" / "penn_treebank"


def train(options: argparse.Namespace) -> None:
    """Train with one method and write its curve."""
    sections = yaml_config.read(ROOT / "configs" / "thesis.yaml")
    sections["model"]["init_args"]["hidden"] = UNITS[options.size]
    sections["data"]["init_args"]["folder"] = str(options.data.resolve())
    sections["trainer"] |= {"max_epochs": options.epochs, "precision": options.precision}
    experiment, methods = load_experiment(sections)
    method = next(method for method in methods if method.name == options.method)
    rate, dropout = RATES[options.size, options.method]
    settings = {"model.learning_rate": rate, "model.dropout": dropout, "memory.momentum": MOMENTUM}
    trial = optuna.trial.FixedTrial(settings)
    stopping = EarlyStopping(experiment, method)
    path = runs_of(options.size) / f"{options.method}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "command": f"--size {options.size} --method {options.method} --epochs {options.epochs}",
        "ratios": ratios(method.make_compressor({}), UNITS[options.size]),
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


def runs_of(size: str) -> Path:
    """Return the folder of a model's runs."""
    return RUNS if size == "medium" else RUNS / size


def ratios(compressor: Compressor, units: int) -> dict[str, float]:
    """Return density or bits, the thesis's count of the ratio, and gradient over payload bytes."""
    level = 1.0 if compressor.level is None else compressor.level
    # Elements of the model's tensors: the embedding, and two layers of the LSTM.
    sizes = (10_000 * units, *(4 * units**2, 4 * units**2, 4 * units, 4 * units) * 2)
    payload = sum(field.nbytes for size in sizes for field in compressor.wire(size))
    counted = 32 / (level if level > 1 else 64 * level)
    counted = 1.0 if compressor.traits.exact else counted
    return {"level": level, "counted": counted, "bytes": 4 * sum(sizes) / payload}


def tabulate(size: str) -> str:
    """Return what has been run, beside what the thesis says."""
    folder = runs_of(size)
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    runs = {name: runs[name] for of, name in RATES if of == size and name in runs}
    if not runs:
        sys.exit(f"{folder}: no run of the {size} model yet; give --data and --method first.")
    old = [name for name, run in runs.items() if "ratios" not in run]
    if old:
        sys.exit(f"{folder}: {', '.join(old)} is from when densities were too high; run it again.")
    versions = dated_page.versions("torch", "pytorch-lightning")
    first = next(iter(runs.values()))
    lines = [
        dated_page.title(f"Penn Treebank, the {size} model"),
        "",
        f"`configs/thesis.yaml`, {UNITS[size]} units, one worker, seed 42, one run of each method",
        f"by `benchmarks/papers/penn_treebank.py --data ptb/ --size {size} --method NAME`. Rates",
        "are those that were read off the thesis's figures; nothing was tuned here.",
        f"{versions}, {os.cpu_count()} CPUs, precision {first['precision']}.",
        "",
        "| | " + " | ".join(runs) + " |",
        "|---|" + "---:|" * len(runs),
    ]
    rows: dict[str, list[str]] = {
        "density, or bits": [f"{r['ratios'].get('level', 1.0):g}" for r in runs.values()],
        "ratio, the thesis's count": [f"{r['ratios']['counted']:g}" for r in runs.values()],
        "ratio, gradient to payload bytes": [f"{r['ratios']['bytes']:.1f}" for r in runs.values()],
        "learning rate": [f"{r['learning_rate']:g}" for r in runs.values()],
        "dropout": [f"{r['dropout']:g}" for r in runs.values()],
        "epochs run (of 50 at most)": [str(len(r["validation"])) for r in runs.values()],
        "seconds per epoch": [f"{statistics.fmean(r['seconds']):.0f}" for r in runs.values()],
        "best validation perplexity": [f"{min(r['validation']):.2f}" for r in runs.values()],
        "in epoch": [str(1 + r["validation"].index(min(r["validation"]))) for r in runs.values()],
        "**test perplexity**": [
            f"{r['test']:.2f}" if r["test"] is not None else "not reached" for r in runs.values()
        ],
        "thesis, test perplexity": [f"{PUBLISHED[size, name]:.2f}" for name in runs],
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


def main() -> None:
    """Train, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with train.txt, valid.txt, test.txt")
    add("--method", choices=list(dict.fromkeys(n for _, n in RATES)), help="what to train with")
    add("--size", choices=list(UNITS), default="medium", help="of the model (default: %(default)s)")
    add("--epochs", type=int, default=50, help="at most (default: %(default)s)")
    add("--precision", default="32-true", help="as for the Trainer (default: %(default)s)")
    add("--table", action="store_true", help="write a dated page in benchmarks/results")
    options = parser.parse_args()
    if options.table:
        text = tabulate(options.size)
        size = "" if options.size == "medium" else f"_{options.size}"
        dated_page.write(dated_page.RESULTS, f"penn_treebank{size}", text)
        print(text)  # noqa: T201
        return
    if options.data is None or options.method is None:
        parser.error("give --data and --method, or --table")
    if (options.size, options.method) not in RATES:
        known = ", ".join(name for size, name in RATES if size == options.size)
        parser.error(f"--method {options.method}: rates of the {options.size} model are of {known}")
    quiet_libraries()
    train(options)


if __name__ == "__main__":
    main()
