"""What ``verify=`` costs: seconds of a processor, and of a clock, in a step of a language model.

Two processes of one thread each train the same model several times over, once for each setting;
the settings take turns step by step. Shown are medians over steps, means over workers, and the
median of the difference to the step without verification that went before. Processor time is that
of all threads of a worker, so that what hides behind the backward pass counts as well. Over
loopback messages cost little; on a network each verified step waits for one more of 8 bytes.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from models import MODELS, build
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, Cast, PowerSGD, TopK, attach
from lightning_gc.methods.text_table import markdown

SETTINGS: tuple[Any, ...] = (0, 1, "payload")
METHODS = {
    "TopK(0.01)": TopK(0.01),
    "QSGD(4)": QSGD(4),
    "PowerSGD(2)": PowerSGD(2),
    "Cast()": Cast(),
}
WORKERS, WARMUP = 2, 6
TIMEOUT = datetime.timedelta(minutes=1)
Found = dict[tuple[str, str, Any], tuple[list[float], list[float]]]
"""Model, method, setting -> seconds of the processor and of the clock in each step."""

COLUMNS = ("", "", "verify", "CPU ms per step", "more", "ms per step", "more")


class Run:
    """One model in training, and the seconds of each of its steps."""

    def __init__(self, model: str, method: str, verify: Any, steps: int) -> None:
        torch.manual_seed(0)
        module, loader = build(model, steps, dist.get_rank() + 1)
        self.module, self.batches = module, iter(loader)
        self.ddp = DistributedDataParallel(module.net, gradient_as_bucket_view=True)
        self.handle = attach(self.ddp, METHODS[method], verify=verify)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), module.rate)
        self.busy: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Make a step; as a strategy does, look for errors before the optimizer's."""
        words, targets = next(self.batches)
        dist.barrier()
        busy, started = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        outputs = self.ddp(words)
        torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        self.handle.check()
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), self.module.clip or 1e9)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.busy.append(time.process_time() - busy)


def work(rank: int, options: argparse.Namespace) -> Found:
    """Measure all methods in one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT, rank=rank, world_size=WORKERS)
    found: Found = {}
    for model, method in itertools.product(options.models, options.methods):
        steps = WARMUP + options.steps
        runs = {verify: Run(model, method, verify, steps) for verify in SETTINGS}
        for step in range(steps):
            for verify in (*SETTINGS[step % 3 :], *SETTINGS[: step % 3]):
                runs[verify].step()
        for verify, run in runs.items():
            found[model, method, verify] = (run.busy[WARMUP:], run.seconds[WARMUP:])
            run.handle.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def table(answers: list[Found]) -> str:
    """Return the table."""
    rows = []
    for model, method, verify in answers[0]:
        row = [MODELS[model], f"`{method}`", f"`{verify!r}`"]
        for what in (0, 1):
            off = [answer[model, method, 0][what] for answer in answers]
            own = [answer[model, method, verify][what] for answer in answers]
            whole = statistics.mean(statistics.median(values) for values in own)
            more = statistics.mean(
                statistics.median(b - a for a, b in zip(one, other, strict=True))
                for one, other in zip(off, own, strict=True)
            )
            base = statistics.mean(statistics.median(values) for values in off)
            row += [f"{1e3 * whole:.1f}", f"{100 * more / base:+.1f} %" if verify else ""]
        rows.append(row)
    return markdown(COLUMNS, rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["lstm8", "lstm32"])
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--steps", type=int, default=60, help="measured steps (default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29517"),
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        found = list(pool.map(partial(work, options=options), range(WORKERS)))
    versions = f"{dated_page.versions('torch')}, {os.cpu_count()} CPUs"
    text = f"""{dated_page.title("Verification")}

`python benchmarks/verification.py` with {versions}:
{WORKERS} workers of one thread over loopback, {options.steps} steps of each.

{table(found)}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "verification", text)


if __name__ == "__main__":
    main()
