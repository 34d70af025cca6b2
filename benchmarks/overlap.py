"""Does communication hide behind the backward pass? A step's seconds beside those of its parts.

Two workers in network namespaces train a model of the network benchmark whose gradient DDP cuts
into several buckets. By turns: no synchronisation (the computation alone), and each compressor,
whose own clock says how long its background thread has compressed, communicated and decoded. What
a step takes less than the sum is overlap. With ``--trace FOLDER`` torch's profiler writes one step
of each worker, to look at in a trace viewer. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT, METHODS, train
from pytorch_lightning import Callback

from lightning_gc.bench.baselines import NONE, PLAIN
from lightning_gc.bench.method_run import WARMUP_STEPS, StepTimer
from lightning_gc.core.text_table import markdown

PHASES = ("compress", "communicate", "decode")
COLUMNS = ("", "step", "computation", *PHASES, "sum of the parts", "hidden")


class Clock(Callback):
    """Adds up what the background thread has done in each step, and profiles one if asked to."""

    def __init__(self, trace: Path | None) -> None:
        self.parts: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.trace = trace
        self._profiler: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Begin the trace."""
        if self.trace is not None and index == WARMUP_STEPS:
            every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._profiler = torch.profiler.profile(experimental_config=every)
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Take the account of this step."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.trace))
            self._profiler = None
        for recording in getattr(trainer.strategy, "recordings", ()):
            seconds = recording.take().seconds
            for phase in PHASES:
                self.phases[phase].append(seconds.get(phase, 0.0))


def turn(method: str, model: str, steps: int, trace: Path | None) -> dict[str, list[float]]:
    """Train from the same weights with a method; return seconds of each measured step."""
    torch.manual_seed(0)
    module, loader = build(model, WARMUP_STEPS + steps, dist.get_rank() + 1)
    watch, clock = StepTimer(lambda _: 0), Clock(trace)
    train(method, module, loader, WARMUP_STEPS + steps, [watch, clock])
    phases = {phase: clock.phases[phase][WARMUP_STEPS:] for phase in PHASES}
    return {"step": watch.seconds[WARMUP_STEPS:], **phases}


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods by turns, in one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for method in (NONE, *options.methods):
            name = f"{method}-worker{dist.get_rank()}.json".replace("/", "_")
            last = options.trace is not None and number == options.rounds - 1
            seconds = turn(
                method, options.model, options.steps, options.trace / name if last else None
            )
            row = found.setdefault(method, {})
            for part, values in seconds.items():
                row.setdefault(part, []).extend(values)
    dist.destroy_process_group()
    return found


def tabulate(answers: list[dict[str, Any]]) -> str:
    """Return the table: medians over steps, means over workers, in milliseconds."""
    rows = []
    alone = _median(answers, NONE, "step")
    for method in answers[0]:
        step = _median(answers, method, "step")
        parts = [_median(answers, method, phase) for phase in PHASES]
        whole = alone + sum(parts)
        known = method not in (NONE, PLAIN)  # DDP's own communication is not ours to time
        cells = [f"{1000 * value:.0f}" for value in (step, alone, *parts, whole)]
        hidden = f"{1000 * (whole - step):.0f}"
        rows.append([method, *cells, hidden] if known else [method, *cells[:2], "", "", "", "", ""])
    return markdown(COLUMNS, rows)


def _median(answers: list[dict[str, Any]], method: str, part: str) -> float:
    medians = [float(statistics.median(a[method][part] or [0.0])) for a in answers]
    return statistics.mean(medians)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--mbit", type=float, default=1000.0, help="speed of the links (default: %(default)s)")
    default = [PLAIN, "Identity()", "QSGD(4)", "TopK(0.01)"]
    add("--methods", nargs="+", choices=METHODS, default=default)
    add("--model", choices=MODELS, default="resnet18", help="(default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of each method")
    add("--steps", type=int, default=10, help="measured steps of a turn")
    add("--trace", type=Path, help="folder for traces")
    add("--out", type=Path, help=argparse.SUPPRESS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("The overlap benchmark")
    arguments = ["--worker", f"--rounds={options.rounds}", f"--steps={options.steps}"]
    arguments += ["--model", options.model, "--methods", *options.methods]
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
        arguments += ["--trace", str(options.trace.resolve())]
    with network(2, Link(options.mbit)) as spaces:
        answers = launch(__file__, arguments, spaces, timeout=1200)
    sys.stdout.write(f"Milliseconds, {MODELS[options.model]}, {options.mbit:g} Mbit/s\n\n")
    sys.stdout.write(tabulate(answers) + "\n")


if __name__ == "__main__":
    main()
