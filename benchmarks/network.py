"""Seconds of a training step on links of a given speed, beside what users would take otherwise.

Each worker is a process in a network namespace; the links are shaped. For every link and model one
run takes all methods by turns, several times over: no synchronisation at all, which is the limit;
plain DDP; torch's fp16 hook; torch's PowerSGD hook of rank 2 (in one bucket, for with several it
can dead-lock over Gloo); ours; and ours with local steps, whose
seconds and bytes are means over the steps from one exchange to the next. Lightning trains in all of
them, with gradients as views of buckets. Loopback knows no congestion, and all workers share this
machine's cores: ratios within a run are what counts. How far a step gets is another question, which
papers/time_to_loss.py asks. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network, sent_bytes
from network_methods import LIMIT, METHODS, steps_between, train

from lightning_gc.bench.benchmark import COLUMNS, cells
from lightning_gc.bench.method_run import WARMUP_STEPS, StepTimer
from lightning_gc.methods.text_table import markdown


def turn(
    method: str,
    model: str,
    steps: int,
    *,
    rate: float = 1.0,
    seed: int = 0,
) -> StepTimer:
    """Train with a method.

    Args:
        method: one of ``METHODS``.
        model: one of ``MODELS``.
        steps: how many.
        rate: times the model's learning rate.
        seed: of the weights, equal on all workers, and of the data.
    """
    torch.manual_seed(seed)
    module, loader = build(model, steps, seed * dist.get_world_size() + dist.get_rank() + 1)
    module.rate *= rate
    watch = StepTimer(lambda _: sent_bytes())
    train(method, module, loader, steps, [watch], clip=module.clip)
    return watch


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods by turns, in one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found: dict[str, Any] = {m: {"seconds": [], "bytes": []} for m in options.methods}
    for _ in range(options.rounds):
        for method in options.methods:
            every = steps_between(method)
            rounds = -(-options.steps // every)
            warmup = -(-WARMUP_STEPS // every) * every  # with an exchange, which makes buffers
            # With one more, which is not measured: bytes are read when a step begins.
            steps = warmup + rounds * every + 1
            watch = turn(method, options.model[0], steps)
            row, seconds = found[method], watch.seconds[warmup:]
            row["seconds"] += [
                statistics.mean(seconds[start * every : (start + 1) * every])
                for start in range(rounds)
            ]
            row["bytes"].append(watch.bytes_per_step(warmup))
    dist.destroy_process_group()
    return found


def summary(answers: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return per method the median seconds and bytes of a step: means over workers."""
    rows: dict[str, dict[str, float]] = {}
    for method in answers[0]:
        own = [answer[method] for answer in answers]
        rows[method] = {
            "seconds": statistics.mean(statistics.median(row["seconds"]) for row in own),
            "bytes": statistics.mean(statistics.median(row["bytes"]) for row in own),
        }
    return rows


def parse() -> argparse.Namespace:
    """Return the command line; ``--worker`` is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2], help="how many, one number or several")
    add("--mbit", type=float, nargs="+", default=[100, 1000, 10_000], help="0: unlimited")
    add("--delay-ms", type=float, default=0.0, help="added to every packet, one way")
    add("--loss", type=float, default=0.0, help="share of packets lost")
    add("--model", nargs="+", choices=MODELS, default=list(MODELS))
    add("--methods", nargs="+", choices=METHODS, help="all that can be measured, if left out")
    add("--rounds", type=int, default=3, help="turns of each method")
    add("--steps", type=int, default=15, help="measured steps of a turn")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2.")
    options.methods = options.methods or METHODS
    return options


def main() -> None:
    """Measure, print, write."""
    options = parse()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("The network benchmark")
    found, text = [], ""
    for workers in options.workers:
        for mbit in options.mbit:
            link = Link(mbit, options.delay_ms, options.loss)
            for model in options.model:
                arguments = ["--worker", f"--rounds={options.rounds}", f"--steps={options.steps}"]
                arguments += ["--model", model, "--methods", *options.methods]
                with network(workers, link) as spaces:
                    rows = summary(launch(__file__, arguments, spaces, timeout=3000))
                found.append({"workers": workers, "link": str(link), "model": model, "rows": rows})
                table = markdown(COLUMNS[:-1], [row[:-1] for row in cells(rows)])  # no losses
                part = f"## {MODELS[model]}, {workers} workers, {link}\n\n{table}"
                dated_page.say(part)
                text += f"{part}\n"
    versions = dated_page.versions("lightning-gc", "torch", "pytorch-lightning")
    head = f"""{dated_page.title("Slow networks")}

`python benchmarks/network.py {" ".join(sys.argv[1:])}` with Python {sys.version.split()[0]},
{versions}, {os.cpu_count()} CPUs. Medians of {options.rounds} x {options.steps} steps, means over
workers; bytes by the interface's counter, per worker.

"""
    dated_page.write(options.out, "network", head + text, found)


if __name__ == "__main__":
    main()
