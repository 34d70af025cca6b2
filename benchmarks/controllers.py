"""Compare controllers: examples/vision.py over several seeds, and a budget on the language model.

Each run is the example in a process of its own; what it writes is all that is read. Prints tables,
writes them into a dated file, and says what holds of what is expected. Exits with 1 if not all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dated_page import RESULTS, columns, say, title, versions, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parents[1] / "examples"
LOW, HIGH, BUDGET = 0.1, 0.01, 0.02  # densities: Accordion's two, and the average to be kept to
WORDS_BUDGET = 0.005  # of the language model
NEAR, CLOSE = 0.01, 0.05  # within one point of dense; within 5 % of the budget
# Name in the table -> options of the example.
METHODS = {
    "dense": "--controller none",
    f"Top-k, {LOW:g}": f"--controller fixed --level {LOW}",
    f"Top-k, {HIGH:g}": f"--controller fixed --level {HIGH}",
    "Accordion": f"--controller accordion --low {LOW} --high {HIGH}",
    "DynamicBitWidth": "--controller bitwidth",
    "TotalError(k_min)": "--controller total-error",
    "TotalErrorBudget": f"--controller total-error-budget --budget {BUDGET}",
}
# A learning rate at which nothing is learnt.
STAGNATING = "--controller bitwidth --patience 3 --epochs 10 --learning-rate 0.0001"
TUNING = "Settings are the example's defaults; nothing was chosen on these seeds."
Summary = dict[str, Any]


class Claim(NamedTuple):
    """One line of what is expected, and what was found."""

    text: str
    found: str
    holds: bool


def run(options: str, seed: int, out: Path, keep: bool) -> Summary:
    """Run the example once; return its summary and the seconds from start to end."""
    kept = out / "run.json"
    if not (keep and kept.is_file()):
        command = [sys.executable, str(EXAMPLES / "vision.py"), *options.split()]
        command += ["--seed", str(seed), "--out", str(out)]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{options} with seed {seed} failed:\n{done.stdout}{done.stderr}")
        seconds = time.perf_counter() - started
        found = json.loads((out / options.split()[1] / "summary.json").read_text())
        kept.write_text(json.dumps(found | {"seconds": seconds}))
    summary: Summary = json.loads(kept.read_text())
    say(
        f"{options}, seed {seed}: {summary['accuracy']:.2%}, "
        f"{summary['wire_bytes_per_step']:,.0f} bytes, {summary['seconds']:.0f} s"
    )
    return summary


def mean(runs: Sequence[Summary], name: str) -> float:
    """Return the mean over seeds."""
    return statistics.mean(float(run[name]) for run in runs)


def claims(table: dict[str, list[Summary]], released: Summary, words: Summary) -> list[Claim]:
    """Hold what was measured against what is expected."""
    dense, much, little, accordion, _, by_theory, by_budget = table.values()
    lines = []
    for name, runs in list(table.items())[3:]:
        apart = mean(runs, "accuracy") - mean(dense, "accuracy")
        text = f"{name} is within 1 point of dense"
        lines.append(Claim(text, f"{100 * apart:+.2f} points", apart >= -NEAR))
    more, sent, less = (mean(r, "wire_bytes_per_step") for r in (much, accordion, little))
    found = f"{less:,.0f} < {sent:,.0f} < {more:,.0f}"
    lines.append(Claim("Accordion's bytes lie between its levels'", found, less < sent < more))
    for name, runs in (("TotalError(k_min)", by_theory), ("TotalErrorBudget", by_budget)):
        apart = mean(runs, "accuracy") - mean(accordion, "accuracy")
        share = mean(runs, "wire_bytes_per_step") / sent
        text = f"{name} is at least as accurate as Accordion, with fewer bytes"
        found = f"{100 * apart:+.2f} points, {share:.2f} of the bytes"
        lines.append(Claim(text, found, apart >= 0 and share < 1))
    free = [row["epoch"] + 1 for row in released["epochs"] if row["level"] is None]
    text = "DynamicBitWidth lets go of compression where nothing is learnt"
    lines.append(Claim(text, f"in epochs {', '.join(map(str, free)) or 'none'}", bool(free)))
    for run in by_budget:
        off = run["density"] / BUDGET - 1
        text = f"TotalErrorBudget({BUDGET}) keeps to it, vision, seed {run['seed']}"
        lines.append(Claim(text, f"{run['density']:.4%}: {off:+.2%}", abs(off) <= CLOSE))
    off = words["density"] / WORDS_BUDGET - 1
    text = f"TotalErrorBudget({WORDS_BUDGET}) keeps to it, language model"
    return [*lines, Claim(text, f"{words['density']:.4%}: {off:+.2%}", abs(off) <= CLOSE)]


def language_model(out: Path, keep: bool) -> Summary:
    """Train the other example under a budget; TensorBoard's file has its levels and densities."""
    path = out / "summary.json"
    if not (keep and path.is_file()):
        command = [sys.executable, str(EXAMPLES / "language_model.py"), "--out", str(out)]
        command += ["--methods", "total_error", "--budget", str(WORDS_BUDGET)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (summary,) = json.loads(path.read_text())["rows"]
    events = EventAccumulator(str(out / "tensorboard" / "total_error")).Reload()
    for name, plural in (("level", "levels"), ("density", "densities")):
        summary[plural] = [s.value for s in events.Scalars(f"~compression_epoch/{name}")]
    return dict(summary)


def comparison(table: dict[str, list[Summary]]) -> str:
    """Return the table of all methods."""
    text = columns("", "accuracy, %", "of each seed", "bytes per step", "ratio", "density")
    for name, runs in table.items():
        each = [100 * run["accuracy"] for run in runs]
        spread = f" ± {statistics.stdev(each):.2f}" if len(each) > 1 else ""
        text += f"| {name} | {statistics.mean(each):.2f}{spread} "
        text += f"| {', '.join(f'{a:.2f}' for a in each)} "
        text += f"| {mean(runs, 'wire_bytes_per_step'):,.0f} | {mean(runs, 'ratio'):.1f} "
        text += f"| {mean(runs, 'density'):.2%} |\n"
    return text


def course(summary: Summary) -> str:
    """Return a run's epochs as a table."""
    text = columns("epoch", "level: least / median / greatest", "density", "accuracy, %", "why")
    for row in summary["epochs"]:
        level = row["level"] or {"": "uncompressed"}
        shown = sorted({f"{v:.3g}" if isinstance(v, float | int) else v for v in level.values()})
        shown = [" / ".join(f"{v:.3g}" for v in level.values())] if len(shown) > 1 else shown
        text += f"| {row['epoch'] + 1} | {shown[0]} | {row['density']:.3%} "
        text += f"| {100 * row['accuracy']:.2f} | {row['reason']} |\n"
    return text


def page(
    options: argparse.Namespace,
    table: dict[str, list[Summary]],
    released: Summary,
    words: Summary,
    lines: Sequence[Claim],
) -> str:
    """Return the dated file's text."""
    ran = versions("lightning-gc", "torch", "pytorch-lightning", "scikit-learn")
    first = table["dense"][0]["settings"]
    seconds = statistics.mean(run["seconds"] for runs in table.values() for run in runs)
    said = "".join(f"| {c.text} | {c.found} | {'yes' if c.holds else 'NO'} |\n" for c in lines)
    spent = columns("epoch", "threshold", "density")
    for epoch, (level, density) in enumerate(zip(words["levels"], words["densities"], strict=True)):
        spent += f"| {epoch + 1} | {level:.3e} | {density:.3%} |\n"
    methods = "\n".join(f"- {name}: `{how}`" for name, how in METHODS.items())
    return f"""{title("Controllers")}

`python benchmarks/controllers.py --seeds {" ".join(map(str, options.seeds))}` with
Python {sys.version.split()[0]}, {ran}, {os.cpu_count()} CPUs.

`examples/vision.py` on scikit-learn's digits: {first["workers"]} workers, {first["epochs"]}
epochs, learning rate {first["learning_rate"]}, {seconds:.0f} s a run from start to end. Accuracy is
of the last epoch on 599 images, so one image is 0.17 points. Bytes are of one worker and step, over
the whole run; density is of all elements, with what goes dense.
{TUNING}

{methods}

{comparison(table)}
## What was expected

{columns("", "found", "holds")}{said}
## A run that stagnates

`{STAGNATING}`

{course(released)}
## Accordion, seed {options.seeds[0]}

{course(table["Accordion"][0])}
## A budget of {BUDGET:.0%}, seed {options.seeds[0]}

{course(table["TotalErrorBudget"][0])}
## A budget of {WORDS_BUDGET:.1%} for the language model

`python examples/language_model.py --methods total_error`: perplexity
{words["test_perplexity"]:.2f} on the test text, {words["ratio"]:.1f} times fewer bytes.

{spent}"""


def main() -> int:
    """Run everything, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs", "controllers"))
    parser.add_argument("--keep", action="store_true", help="take finished runs as they are")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the dated file")
    options = parser.parse_args()
    table: dict[str, list[Summary]] = {name: [] for name in METHODS}
    for seed in options.seeds:
        for index, (name, how) in enumerate(METHODS.items()):
            folder = options.runs / f"seed{seed}" / str(index)
            table[name].append(run(how, seed, folder, options.keep))
    released = run(STAGNATING, options.seeds[0], options.runs / "stagnating", options.keep)
    words = language_model(options.runs / "language_model", options.keep)
    lines = claims(table, released, words)
    text = page(options, table, released, words, lines)
    say(text)
    write(options.out, "controllers", text)
    return int(not all(line.holds for line in lines))


if __name__ == "__main__":
    sys.exit(main())
