"""Levels that follow a link whose speed changes during the run, beside fixed ones, for as long.

    python benchmarks/varying_link.py        # needs Linux, root and iproute2

Two workers in network namespaces train the language model of the network benchmark with ``TopK``
for equal seconds. The link has 1 Gbit/s, in the middle third 100 Mbit/s, then 1 Gbit/s again: each
worker shapes its own way out when the time has come. ``BandwidthAware`` shall keep to a time that
is first measured: of a step at the largest density while the link is fast, and a share more. Its
decisions are every eighth step, so a turn after a change is eight steps.

All arms of a seed have the same weights and batches, and the same rate; their loss is the mean over
workers of the last steps' training loss when the time is up.

Every run goes to ``varying_link.json`` as soon as it is there; with equal options it is not made
again. Delete the file to measure anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from dated_page import RESULTS, stem, title, versions, write
from matplotlib.figure import Figure
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT

from lightning_gc import CompressedDDPStrategy, TopK
from lightning_gc.controllers import BandwidthAware, Controller, Fixed
from lightning_gc.methods import plot_style
from lightning_gc.methods.text_table import markdown

WORKERS, MODEL, TURN, LAST = 2, "lstm8", 8, 20
FAST, SLOW = Link(mbit=1000), Link(mbit=100)
LEVELS = (0.1, 0.03, 0.01, 0.003)
AWARE = "BandwidthAware"


@dataclass(frozen=True)
class Step:
    """One step of one worker.

    Attributes:
        at: seconds since training began, when the step ended.
        seconds: since the last one ended.
        loss: of its batch.
        level: density in force.
    """

    at: float
    seconds: float
    loss: float
    level: float


class Course(pl.Callback):
    """Shapes the link by the clock, records every step, and ends training when the time is up.

    Args:
        seconds: of the run.
        changes: whether the link is slow in the middle third.
    """

    def __init__(self, seconds: float, changes: bool) -> None:
        self.seconds, self.changes = seconds, changes
        self.steps: list[Step] = []
        self._link = FAST
        self._began = self._last = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock of all workers."""
        dist.barrier()
        self._began = self._last = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        """Shape this worker's way out."""
        third = 3 * (time.perf_counter() - self._began) / self.seconds
        link = SLOW if self.changes and 1 <= third < 2 else FAST
        if link != self._link:
            link.shape()
            self._link = link

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Record the step; workers stop after the same one."""
        now = time.perf_counter()
        level = next(level for level in trainer.strategy.levels().values() if level is not None)
        at, took = now - self._began, now - self._last
        self.steps.append(Step(at, took, float(outputs["loss"]), level))
        self._last = now
        over = at >= self.seconds
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(over, all=False)


def controller(arm: str, target: float) -> Controller:
    """Return that of an arm: a density, or ``BandwidthAware`` at this time of a step."""
    if arm != AWARE:
        return Fixed(float(arm))
    return BandwidthAware(LEVELS, step_seconds=target, every=TURN)


def work(options: argparse.Namespace) -> list[dict[str, float]]:
    """Train one arm, as one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    worker, (arm,), (seed,) = dist.get_rank(), options.arms, options.seeds
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(worker)}
    torch.manual_seed(seed)
    module, loader = build(MODEL, options.most_steps, seed * WORKERS + worker + 1)
    course = Course(options.seconds, not options.calibrate)
    strategy = CompressedDDPStrategy(
        TopK(),
        controller=controller(arm, options.target),
        process_group_backend="gloo",
        timeout=LIMIT,
        gradient_as_bucket_view=True,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=WORKERS,
        strategy=strategy,
        callbacks=[course],
        max_epochs=1,
        use_distributed_sampler=False,
        gradient_clip_val=module.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    check_length(course.steps, options.most_steps)
    dist.destroy_process_group()
    return [asdict(step) for step in course.steps]


def check_length(steps: list[Step], most: int) -> None:
    """Raise RuntimeError if batches were over before the time."""
    if len(steps) >= most:
        raise RuntimeError(f"{most} steps were over before the time; --most-steps.")


def measure(options: argparse.Namespace, arm: str, seed: int, *more: str) -> list[Step]:
    """Run one arm; return its steps, with means over workers of seconds and losses."""
    words = ["--worker", f"--arms={arm}", f"--seeds={seed}", f"--most-steps={options.most_steps}"]
    with network(WORKERS, FAST) as spaces:
        timeout = 3 * options.seconds + LIMIT.total_seconds()
        answers = launch(__file__, [*words, *more], spaces, timeout)
    means = ("at", "seconds", "loss")
    return [
        Step(level=of[0]["level"], **{name: statistics.mean(s[name] for s in of) for name in means})
        for of in zip(*answers, strict=True)
    ]


def final_loss(steps: list[Step]) -> float:
    """Return the mean loss of the last steps."""
    return statistics.mean(step.loss for step in steps[-LAST:])


def kept(steps: list[Step], seconds: float, target: float) -> float:
    """Return the share of steps within 1.15 times the target, but for a turn after each change."""
    changes = [0.0, seconds / 3, 2 * seconds / 3]
    skipped = set()
    for change in changes:
        first = next((i for i, step in enumerate(steps) if step.at > change), len(steps))
        skipped |= set(range(first, first + TURN))
    counted = [step for i, step in enumerate(steps) if i not in skipped]
    return statistics.mean(step.seconds <= 1.15 * target for step in counted)


def spread(numbers: list[float], how: str) -> str:
    """Return mean and standard deviation."""
    text = f"{statistics.mean(numbers):{how}}"
    return f"{text} ± {statistics.stdev(numbers):{how}}" if len(numbers) > 1 else text


def line(arm: str, runs: list[list[Step]], seconds: float, target: float) -> list[str]:
    """Return an arm's row of the table."""
    thirds = [
        statistics.median(
            step.seconds for run in runs for step in run if part <= 3 * step.at / seconds < part + 1
        )
        for part in range(3)
    ]
    return [
        arm if arm == AWARE else f"density {arm}",
        spread([len(run) for run in runs], ".0f"),
        *(f"{third:.3f}" for third in thirds),
        spread([100 * kept(run, seconds, target) for run in runs], ".0f"),
        spread([final_loss(run) for run in runs], ".3f"),
    ]


def draw(found: dict[str, list[list[Step]]], seconds: float, target: float, path: Path) -> None:
    """Draw step seconds and the level over time, and the loss, of the first seed."""

    def panels(figure: Figure) -> None:
        figure.set_size_inches(plot_style.WIDTH, 7)
        above, middle, below = figure.subplots(3, sharex=True)
        for (arm, runs), colour in zip(found.items(), plot_style.SERIES, strict=False):
            times = [step.at for step in runs[0]]
            style = {"color": colour, "lw": 1.8 if arm == AWARE else 0.9}
            above.plot(times, [step.seconds for step in runs[0]], label=arm, **style)
            middle.plot(times, [step.level for step in runs[0]], **style)
            losses = [step.loss for step in runs[0]]
            smooth = [statistics.mean(losses[max(0, i - LAST) : i + 1]) for i in range(len(losses))]
            below.plot(times, smooth, **style)
        above.axhline(target, color=plot_style.MUTED, lw=0.8, ls="--")
        above.set(ylabel="seconds of a step", ylim=(0, 4 * target))
        plot_style.plain_log(middle.yaxis)
        middle.set(ylabel="density")
        below.set(ylabel="training loss", xlabel="seconds; in the middle third the link is slow")
        for ax in (above, middle, below):
            ax.axvspan(seconds / 3, 2 * seconds / 3, color=plot_style.SHADE, zorder=0)
        plot_style.legend(figure)

    path.write_bytes(plot_style.svg(panels, "varying_link"))


def parse() -> argparse.Namespace:
    """Return the command line; what is suppressed is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add(
        "--arms",
        nargs="+",
        default=[*map(str, LEVELS), AWARE],
        help="densities, and BandwidthAware",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--seconds", type=float, default=90, help="of each run")
    add("--spare", type=float, default=0.15, help="the target's share over a fast link's step")
    add("--most-steps", type=int, default=2000, help="for which there are batches")
    add("--kept", type=Path, default=Path("varying_link.json"), help="runs, kept between calls")
    add("--out", type=Path, default=RESULTS, help="folder of the dated files")
    add("--target", type=float, default=1.0, help=argparse.SUPPRESS)
    add("--calibrate", action="store_true", help=argparse.SUPPRESS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def read(path: Path, options: dict[str, float]) -> dict[str, Any]:
    """Return the target and the runs that there are of equal options; else none."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known if known.get("options") == options else {"options": options, "runs": {}}


def main() -> None:
    """Measure, print, write."""
    options = parse()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("This benchmark")
    seconds = options.seconds
    path = options.kept
    known = read(
        path, {name: getattr(options, name) for name in ("seconds", "spare", "most_steps")}
    )
    if "target" not in known:
        fast = measure(options, str(LEVELS[0]), 0, f"--seconds={seconds / 3}", "--calibrate")
        median = statistics.median(step.seconds for step in fast[TURN:])
        known["target"] = (1 + options.spare) * median
        path.write_text(json.dumps(known))
    target = known["target"]
    found: dict[str, list[list[Step]]] = {arm: [] for arm in options.arms}
    for seed in options.seeds:
        for arm, runs in found.items():
            name = f"{arm}, seed {seed}"
            if name not in known["runs"]:
                steps = measure(options, arm, seed, f"--seconds={seconds}", f"--target={target}")
                known["runs"][name] = [asdict(step) for step in steps]
                path.write_text(json.dumps(known))
            runs.append([Step(**step) for step in known["runs"][name]])
            sys.stderr.write(f"{name}: {len(runs[-1])} steps, {final_loss(runs[-1]):.3f}\n")
    thirds = [f"step, {link}" for link in (FAST, SLOW, FAST)]
    head = ["", "steps", *thirds, "steps within 1.15 × target, %", "loss at the end"]
    table = markdown(head, [line(arm, runs, seconds, target) for arm, runs in found.items()])
    picture = stem(options.out, "varying_link").with_suffix(".svg")
    text = f"""{title("A link whose speed changes")}

`python benchmarks/varying_link.py {" ".join(sys.argv[1:])}`: {MODELS[MODEL]}, {WORKERS} workers,
`TopK`, {seconds:g} s a run, of which the middle third at {SLOW}, the others at {FAST}. Target of
`BandwidthAware`: {target:.3f} s a step, {options.spare:.0%} over the median of density {LEVELS[0]}
at {FAST}. {versions("torch")}, {os.cpu_count()} CPUs; {len(options.seeds)} seeds. Steps within
1.15 × target: but for the {TURN} after the start and each change. Loss: mean of the last {LAST}
steps, mean and standard deviation over seeds.

{table}

![Seconds of a step, density and loss over the run]({picture.name})
"""
    sys.stdout.write(text)
    write(options.out, "varying_link", text)
    draw(found, seconds, target, picture)


if __name__ == "__main__":
    main()
