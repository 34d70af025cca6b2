"""``auto`` on a link that changes twice, beside DDP in 32 and 16 bits and what it may choose.

    python benchmarks/auto_changing.py             # needs Linux, root and iproute2

Two workers in network namespaces train the language model of the network benchmark for equally many
steps at 1 Gbit/s, 100 Mbit/s and 10 Gbit/s, which is more than loopback carries here: each worker
shapes its own way out before the first step of each part. An oracle that knows each part takes the
fastest arm of all parts. Every arm goes to ``auto_changing.json`` as soon as it is there; with
equal options it is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from auto import FIXED, ROUNDING, WORDS, strategy_of
from matplotlib.figure import Figure
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT, fit

from lightning_gc.bench.baselines import FP16, PLAIN
from lightning_gc.bench.method_run import StepTimer
from lightning_gc.methods import plot_style
from lightning_gc.methods.text_table import markdown

WORKERS, MODEL = 2, "lstm8"
LINKS = (Link(1000), Link(100), Link(10_000))
TORCHS = (PLAIN, FP16)
ARMS = (*TORCHS, *FIXED, *WORDS)


class Course(StepTimer):
    """Shapes the link, times steps, and notes what is in force.

    Args:
        part: steps at each speed.
    """

    def __init__(self, part: int) -> None:
        super().__init__(lambda _: 0)
        self.part = part
        self.names: list[str] = []
        self.spent = 0.0

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        """Shape this worker's way out, if a part begins; all workers do."""
        step = len(self.seconds)
        if step % self.part == 0 and step < self.part * len(LINKS):
            LINKS[step // self.part].shape()
        control = getattr(trainer.strategy, "control_loop", None)
        if control is not None:
            self.names.append(control.state["name"])
            self.spent = control.state["spent"]
        super().on_train_batch_start(trainer, *rest)


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm, as one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    torch.manual_seed(0)
    (arm,), steps = options.arms, options.steps * len(LINKS)
    module, loader = build(MODEL, steps, dist.get_rank() + 1)
    course = Course(options.steps)
    fit(strategy_of(arm), module, loader, steps, [course], clip=module.clip)
    dist.destroy_process_group()
    return {"seconds": course.seconds, "names": course.names, "spent": course.spent}


def measure(arm: str, steps: int) -> dict[str, Any]:
    """Run one arm; return worker 0's steps."""
    words = ["--worker", f"--steps={steps}", "--arms", arm]
    with network(WORKERS, LINKS[0]) as spaces:
        answers = launch(__file__, words, spaces, timeout=7200)
    found: dict[str, Any] = answers[0]
    return found


def parts_of(run: dict[str, Any], steps: int) -> list[float]:
    """Return the seconds of each part."""
    return [sum(run["seconds"][steps * i : steps * (i + 1)]) for i in range(len(LINKS))]


def table_of(runs: dict[str, Any], steps: int) -> str:
    """Return the seconds of each arm and part, and of an oracle of each word."""
    rows, parts = [], {arm: parts_of(run, steps) for arm, run in runs.items()}
    for arm, each in parts.items():
        looking = f"{runs[arm]['spent'] + 0:.2f}" if arm in WORDS else ""
        name = f"auto, {arm}" if arm in WORDS else arm
        rows.append([name, *(f"{s:.1f}" for s in each), f"{sum(each):.1f}", looking])
    for word in WORDS:
        fixed = [parts[a] for a in parts if a in TORCHS or a in ROUNDING or
                 (word == "feedback" and a in FIXED)]  # fmt: skip
        best = [min(column) for column in zip(*fixed, strict=True)]
        factor = sum(parts[word]) / sum(best) if word in parts else 0.0
        name = f"oracle, {word}"
        rows.append(
            [name, *(f"{s:.1f}" for s in best), f"{sum(best):.1f}", f"auto: {factor:.2f} ×"]
        )
    head = ["seconds", *map(str, LINKS), "all", "looking"]
    return markdown(head, rows)


def draw(runs: dict[str, Any], steps: int, path: Path) -> None:
    """Draw the seconds so far of every arm, and what auto had chosen."""

    def panels(figure: Figure) -> None:
        figure.set_size_inches(plot_style.WIDTH, 6)
        above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
        colours = iter(plot_style.SERIES)
        for arm, run in runs.items():
            ours = arm in WORDS
            colour = next(colours) if ours or arm in TORCHS else plot_style.MUTED
            smooth = [statistics.median(run["seconds"][max(0, i - 8) : i + 1])
                      for i in range(len(run["seconds"]))]  # fmt: skip
            label = f"auto, {arm}" if ours else arm if arm in TORCHS else None
            above.plot(smooth, color=colour, lw=1.8 if ours else 0.8, label=label)
            if ours:
                below.plot(run["names"][: len(smooth)], color=colour, lw=1.8)
        plot_style.plain_log(above.yaxis)
        above.set(ylabel="seconds of a step")
        fast, slow, last = LINKS
        below.set(ylabel="chosen", xlabel=f"step, at {fast}, {slow} and {last}")
        for ax in (above, below):
            ax.axvspan(steps, 2 * steps, color=plot_style.SHADE, zorder=0)
        plot_style.legend(figure)

    path.write_bytes(plot_style.svg(panels, "auto_changing"))


def parse() -> argparse.Namespace:
    """Return the command line; ``--worker`` is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--steps", type=int, default=200, help="at each speed")
    add("--kept", type=Path, default=Path("auto_changing.json"), help="runs, kept between calls")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, print, write."""
    options = parse()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("This benchmark")
    known = json.loads(options.kept.read_text()) if options.kept.exists() else {}
    for arm in options.arms:
        name = f"{arm}, {options.steps} steps"
        if name not in known:
            known[name] = measure(arm, options.steps)
            options.kept.write_text(json.dumps(known))
            dated_page.say(f"{name}: {sum(known[name]['seconds']):.1f} s")
    runs = {arm: known[f"{arm}, {options.steps} steps"] for arm in options.arms}
    picture = dated_page.stem(options.out, "auto_changing").with_suffix(".svg")
    text = f"""{dated_page.title("auto on a link that changes twice")}

`python benchmarks/auto_changing.py --steps {options.steps}`: {MODELS[MODEL]}, {WORKERS} workers.
{dated_page.versions("torch", "pytorch-lightning")}, {os.cpu_count()} CPUs.

{table_of(runs, options.steps)}
![Seconds of a step, and what auto had chosen]({picture.name})
"""
    dated_page.say(text)
    dated_page.write(options.out, "auto_changing", text)
    draw(runs, options.steps, picture)


if __name__ == "__main__":
    main()
