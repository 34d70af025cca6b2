"""Seconds until plain DDP's loss after some steps is reached, each method at its own learning rate.

Two workers train every method of the network benchmark, over a link as fast as the machine: how
many steps a loss takes does not depend on the link. A method's rate is the one of ``RATES`` times
the model's that reaches plain DDP's best loss after ``--steps`` steps in the fewest steps, found
with weights and data that are not used again; then come ``SEEDS``. Steps times the seconds of a
step, from a table of benchmarks/network.py, are seconds to that loss.

The loss is the mean over workers of the training loss, of the last ``WINDOW`` steps. Rows that are
in the results file already are not measured again. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import network as bench
import torch
import torch.distributed as dist
from dated_page import RESULTS, title, write
from models import MODELS
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT, METHODS

from lightning_gc.bench.baselines import NONE, PLAIN
from lightning_gc.methods.text_table import markdown

RATES = (0.5, 1.0, 2.0, 4.0)
SEEDS = (0, 1, 2)
TUNING = 100  # a seed
WINDOW = 20
WORKERS = 2
Fits = dict[str, list[float]]
"""``rate seed`` -> losses of all steps."""


def work(options: argparse.Namespace) -> Fits:
    """Train with one method, as one worker: at all rates, or with all seeds at one rate."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    (method,), (model,) = options.methods, options.model
    found = {}
    for rate in options.rates:
        for seed in options.seeds:
            watch = bench.turn(method, model, options.limit, rate=rate, seed=seed)
            found[key(rate, seed)] = watch.losses
    dist.destroy_process_group()
    return found


def key(rate: float, seed: int) -> str:
    """Return the key of a fit."""
    return f"{rate:g} {seed}"


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the means of the last ``WINDOW`` losses, after each step from the ``WINDOW``-th on."""
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(len(losses) - WINDOW + 1)]


def loss_after(losses: Sequence[float], steps: int) -> float:
    """Return the smooth loss after so many steps."""
    return smooth(losses[:steps])[-1]


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """Return the steps after which the smooth loss is at the target, if it ever is."""
    reached = (i for i, loss in enumerate(smooth(losses)) if loss <= target)
    first = next(reached, None)
    return None if first is None else first + WINDOW


class Results:
    """Fits of all methods, kept in a file.

    Args:
        path: a JSON file, or none yet.
        options: the command line.
    """

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._path, self._options = path, options
        self._fits: dict[str, Fits] = json.loads(path.read_text()) if path.exists() else {}

    def fits(self, method: str, rates: Sequence[float], seeds: Sequence[int]) -> list[list[float]]:
        """Return losses of fits, measured if they are not in the file yet."""
        kept = self._fits.setdefault(f"{self._options.model[0]} {method}", {})
        wanted = [key(rate, seed) for rate in rates for seed in seeds]
        missing = [rate for rate in rates if any(key(rate, seed) not in kept for seed in seeds)]
        if missing:
            arguments = ["--worker", "--methods", method, f"--steps={self._options.steps}"]
            arguments += [f"--limit={self._options.limit}"]
            arguments += ["--model", *self._options.model, "--rates", *map(str, missing)]
            arguments += ["--seeds", *map(str, seeds)]
            with network(WORKERS, Link()) as spaces:
                answers = launch(__file__, arguments, spaces, timeout=7200)
            for name in answers[0]:
                of_workers = zip(*(answer[name] for answer in answers), strict=True)
                kept[name] = [statistics.mean(losses) for losses in of_workers]
            self._path.write_text(json.dumps(self._fits))
        return [kept[name] for name in wanted]


def best_rate(fits: Sequence[Sequence[float]], target: float) -> float:
    """Return the rate that takes the fewest steps to the target, else the one of the least loss."""
    pairs = list(zip(RATES, fits, strict=True))
    reached = {rate: n for rate, losses in pairs if (n := steps_to(losses, target)) is not None}
    if reached:
        return min(reached, key=lambda rate: reached[rate])
    return min(pairs, key=lambda pair: loss_after(pair[1], len(pair[1])))[0]


def seconds_per_step(path: Path, model: str) -> dict[str, dict[str, float]]:
    """Return link -> method -> seconds of a step of two workers."""
    return {
        part["link"]: {method: row["seconds"] for method, row in part["rows"].items()}
        for part in json.loads(path.read_text())
        if part["workers"] == WORKERS and part["model"] == model
    }


def spread(numbers: Sequence[float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(numbers):.1f} ± {statistics.stdev(numbers):.1f}"


def row(
    method: str,
    rate: float,
    steps: Sequence[int | None],
    seconds: Mapping[str, Mapping[str, float]],
) -> list[str]:
    """Return a line of the table."""
    reached = [n for n in steps if n is not None]
    edge = " (at the edge)" if rate in (RATES[0], RATES[-1]) else ""
    cells = [method, f"{rate:g}{edge}"]
    if len(reached) < len(steps):
        return [*cells, f"reached by {len(reached)} of {len(steps)}", *("" for _ in seconds)]
    times = ([n * of[method] for n in reached] if method in of else [] for of in seconds.values())
    return [*cells, spread(reached), *(spread(t) if t else "not measured" for t in times)]


def table(results: Results, options: argparse.Namespace) -> str:
    """Measure all methods and return the table."""
    dense = results.fits(PLAIN, RATES, [TUNING])
    target = min(loss_after(losses, options.steps) for losses in dense)
    targets: list[float] = []
    seconds = seconds_per_step(options.seconds, options.model[0])
    lines = []
    for method in dict.fromkeys([PLAIN, *options.methods]):
        fits = results.fits(method, RATES, [TUNING])
        rate = best_rate(fits, target)
        final = results.fits(method, [rate], SEEDS)
        # Plain DDP is the first method, and its loss is every seed's target.
        targets = targets or [loss_after(losses, options.steps) for losses in final]
        steps = [steps_to(losses, goal) for losses, goal in zip(final, targets, strict=True)]
        lines.append(row(method, rate, steps, seconds))
        sys.stderr.write(" | ".join(lines[-1]) + "\n")
    head = ["", "rate, times the model's", "steps", *(f"seconds, {link}" for link in seconds)]
    means = ", ".join(f"{goal:.3f}" for goal in targets)
    what = f"{MODELS[options.model[0]]}; losses after {options.steps} steps of plain DDP: {means}"
    return f"## {what}\n\n{markdown(head, lines)}\n"


def parse() -> argparse.Namespace:
    """Return the command line; what is suppressed is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", nargs=1, choices=MODELS, default=["lstm8"])
    add("--methods", nargs="+", choices=METHODS, help="all that can be measured, if left out")
    add("--steps", type=int, default=200, help="of plain DDP, whose loss is the target")
    add("--limit", type=int, default=300, help="steps after which a method has not reached it")
    newest = max(RESULTS.glob("network_*.json"), default=RESULTS / "network.json")
    add("--seconds", type=Path, default=newest, help="rows of benchmarks/network.py")
    add("--fits", type=Path, default=Path("time_to_loss.json"), help="losses, kept between calls")
    add("--out", type=Path, default=RESULTS, help="folder of the dated file")
    add("--rates", type=float, nargs="+", help=argparse.SUPPRESS)
    add("--seeds", type=int, nargs="+", help=argparse.SUPPRESS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not WINDOW <= options.steps <= options.limit:
        parser.error(f"--steps must be at least {WINDOW} and at most --limit.")
    options.methods = [method for method in options.methods or METHODS if method != NONE]
    return options


def main() -> None:
    """Measure, print, write."""
    options = parse()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("This benchmark")
    text = table(Results(options.fits, options), options)
    sys.stdout.write(text)
    head = f"""{title("Seconds to plain DDP's loss")}

`python benchmarks/time_to_loss.py {" ".join(sys.argv[1:])}`: {WORKERS} workers; seconds of a step
from `{options.seconds.name}`. Means and standard deviations of {len(SEEDS)} seeds.

"""
    write(options.out, f"time_to_loss_{options.model[0]}", head + text)


if __name__ == "__main__":
    main()
