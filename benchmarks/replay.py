"""Seconds per step that a GPU would need on links of a given speed, by replay, without a GPU.

    python benchmarks/replay.py            # needs Linux, root and iproute2
    python benchmarks/replay.py --check    # beside trainings whose computation is slept
    python benchmarks/replay.py --plot     # the picture of the newest results, and no run

Workers are processes in network namespaces; the links are shaped. `lightning-gc bench --replay`
sleeps the GPU's part of a step and the part of compression, and sends the messages. Above each
table is the rate of a large all-reduce, which on fast links is the machine's own limit.

With ``--check`` each replay has real trainings beside it: DDP makes the buckets, and torch's hook
or ``attach`` handles them. Their passes are slept, and compression as well, each for as long as in
the replay. In a last column this machine's CPU compresses, while it copies the gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from namespaces import Link, check_privileges, launch, network
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import Identity, attach
from lightning_gc.advice.costs import segment_trace
from lightning_gc.advice.description import HOOK, PLAIN, shapes_of
from lightning_gc.advice.link_probe import probe, sustained
from lightning_gc.advice.prediction import Situation
from lightning_gc.advice.replay import measure, request
from lightning_gc.advice.traces import Trace
from lightning_gc.advice.what_if import WhatIf
from lightning_gc.bench.baselines import NONE
from lightning_gc.bench.benchmark import COLUMNS, cells
from lightning_gc.compressors.joint import WholeCodec
from lightning_gc.core import Bucket, Flow
from lightning_gc.methods import plot_style
from lightning_gc.methods.text_table import markdown
from lightning_gc.schemes import Scheme
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.link import Link as Unused

LIMIT = timedelta(seconds=300)
CPU = torch.device("cpu")
STEP_MS = {"gpt2": 46.7, "resnet50": 100.0}
"""Milliseconds of a step: GPT-2's on an H100 (docs/gpus.md), for ResNet-50 a round number."""


class Clock:
    """When the backward pass began."""

    began = 0.0


class Slept(torch.autograd.Function):
    """Part of a backward pass, which is ready at its time and has always the same gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ready: float, grads: list[Tensor], *params: Tensor) -> Tensor:
        """Return a copy."""
        ctx.ready, ctx.grads = ready, grads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Sleep until the gradients are ready."""
        time.sleep(max(Clock.began + ctx.ready - time.perf_counter(), 0.0))
        return grad, None, None, *ctx.grads


class Asleep(nn.Module):
    """A module of a description: its passes are slept."""

    def __init__(self, case: WhatIf) -> None:
        super().__init__()
        situation = case.situation()
        self.pause, self.ready = (
            situation.module.forward,
            dict(zip(situation.names, situation.ready, strict=True)),
        )
        self.names = list(case.shapes)
        self.params = nn.ParameterList(torch.zeros(shape) for shape in case.shapes.values())
        draw = torch.Generator().manual_seed(dist.get_rank())
        self.grads = [torch.randn(p.shape, generator=draw) for p in self.params]

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and return a number that needs all parameters."""
        time.sleep(self.pause)
        for name, param, grad in zip(self.names, self.params, self.grads, strict=True):
            x = Slept.apply(  # type: ignore[no-untyped-call]
                x, self.ready[name], [grad], param
            )
        return x


class Here(WhatIf):
    """A description with this machine's seconds of compression, which delay no slept pass."""

    @functools.cached_property
    def _costs(self) -> dict[str, list[Trace]]:
        base = super().situation()
        names = [[base.names[i] for i in piece] for piece in base.pieces]
        shapes = [{name: self.shapes[name] for name in piece} for piece in names]
        owns = [torch.randn(sum(map(math.prod, each.values()))) for each in shapes]
        found = {
            name: [
                segment_trace(method, each, own, self.workers)
                for each, own in zip(shapes, owns, strict=True)
            ]
            for name, method in {base.whole: None, **self.methods}.items()
        }
        of_worker_0 = [found]  # one schedule for all
        dist.broadcast_object_list(of_worker_0)
        return of_worker_0[0]

    def situation(self) -> Situation:
        """Return what ``advise`` would have measured of a module that sleeps."""
        return replace(super().situation(), costs=self._costs, contention=0.0)


@dataclass(frozen=True)
class SleptScheme(Scheme):
    """Sleeps instead of compressing, and sends messages of a compressor's sizes."""

    traces: tuple[tuple[int, Trace], ...] = ()

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Sleep and send; leave the mean as it is."""
        whole = sum(map(math.prod, bucket.shapes.values()))
        # DDP arranges its buckets after the first step.
        trace = dict(self.traces).get(whole, self.traces[-1][1] if not bucket.step else None)
        assert trace is not None, f"No bucket of {whole} elements was expected."
        for seconds, asked in zip(trace.seconds, trace.asked, strict=False):
            time.sleep(seconds)
            yield request(asked, bucket.workers)
        time.sleep(trace.seconds[-1])


def trained(case: WhatIf, method: str, steps: int, slept: bool) -> list[float]:
    """Return the seconds of steps of a real training whose passes are slept.

    Args:
        case: the description.
        method: one of its methods, or a baseline.
        steps: how many.
        slept: compression is, too.
    """
    ddp = DistributedDataParallel(Asleep(case), gradient_as_bucket_view=True)
    handle = None
    if method == HOOK:  # over Gloo torch has that of fp16 only
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method != PLAIN:
        chosen = case.methods[method]
        parts: tuple[Any, ...] = (chosen.make_compressor({}), *chosen.memory_and_scheme())
        if slept:
            situation = case.situation()
            sizes = [round(each.asked[0].nbytes / 4) for _, each in situation.buckets(None)]
            traces = [each for _, each in situation.buckets(None, situation.costs[method])]
            parts = (Identity(), None, SleptScheme(tuple(zip(sizes, traces, strict=True))))
        handle = attach(ddp, *parts, timeout=LIMIT)
    found = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(3 + steps):  # buckets are made again, kernels are read
        dist.barrier()
        began = time.perf_counter()
        y = ddp(x)
        Clock.began = time.perf_counter()
        y.sum().backward()
        found.append(time.perf_counter() - began)
        ddp.zero_grad(set_to_none=True)
    if handle is not None:
        handle.close()
    return found[3:]


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one table, as one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    (model,) = options.model
    methods = tuple(options.methods)
    kind = Here if options.check else WhatIf
    case = kind(
        *(shapes_of(model), STEP_MS[model] * 1e-3, dist.get_world_size(), Unused(1e6, 50.0)),
        gpu=not options.check,
        chosen=methods,
    )
    own = sustained(probe(Distributed(), CPU, ["Mean"])["Mean"])
    rounds = options.rounds
    if not options.check:
        rows = measure(case, rounds, options.steps, lambda _: None)
        dist.destroy_process_group()
        return {"gbps": own, "rows": rows}
    found: dict[str, list[list[float]]] = {m: [[], [], []] for m in (PLAIN, HOOK, *case.methods)}
    for _ in range(rounds):
        rows = measure(case, 1, options.steps, lambda _: None)
        for name, (replayed, *real) in found.items():
            replayed.append(rows[name]["seconds"])
            for column, slept in zip(real, (True, False), strict=True):
                column.append(statistics.median(trained(case, name, options.steps, slept)))
    dist.destroy_process_group()
    return {"gbps": own, "pairs": found}


def compared(found: dict[str, list[list[float]]]) -> str:
    """Return a table of medians of rounds: replayed, trained, their ratio, and on these cores."""
    lines = []
    for name, columns in found.items():
        replayed, slept, real = map(statistics.median, columns)
        ratio = f"{replayed / slept:.3f}"
        lines.append([name, f"{replayed:.4f}", f"{slept:.4f}", ratio, f"{real:.4f}"])
    head = ["", "s replayed", "s trained", "replayed / trained", "s, compressed by these cores"]
    return markdown(head, lines)


def draw(found: list[dict[str, Any]], figure: Figure) -> None:
    """Draw seconds per step as points, a panel for each model and link; a line is the limit."""
    cases = {(part["model"], part["link"]): None for part in found if _is_shown(part)}
    workers = sorted({part["workers"] for part in found})
    figure.set_size_inches(plot_style.WIDTH, 1.9 * len(cases))
    panels = figure.subplots(len(cases), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (model, link) in zip(panels, cases, strict=True):
        for part in found:
            if (part["model"], part["link"]) == (model, link) and _is_shown(part):
                rows = dict(part["rows"])
                limit = rows.pop(NONE)["seconds"]
                of = workers.index(part["workers"])
                seconds = [row["seconds"] for row in rows.values()]
                marks = {"marker": plot_style.MARKERS[of], "color": plot_style.SERIES[of]}
                axes.plot(seconds, list(rows), ls="", label=f"{part['workers']} workers", **marks)
                axes.axvline(limit, color=plot_style.INK, ls="--", lw=0.8)
        axes.set(title=f"{model}, {link}", ylim=(len(rows) - 0.5, -0.5))
        plot_style.plain_log(axes.xaxis)
    panels[-1].set_xlabel("seconds per step")
    plot_style.legend(figure)


def _is_shown(part: dict[str, Any]) -> bool:
    """Say whether the machine had at least half of the link's rate."""
    rate, unit = part["link"].split()
    return bool(part["gbps"] >= 0.5 * float(rate) * {"Mbit/s": 1e-3, "Gbit/s": 1.0}[unit])


def plot() -> None:
    """Draw the newest results for the documentation."""
    newest = max(dated_page.RESULTS.glob("replay_2*.json"))
    image = plot_style.svg(functools.partial(draw, json.loads(newest.read_text())), "replay")
    (Path(__file__).parents[1] / "docs" / "images" / "replay.svg").write_bytes(image)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4], help="how many, one number or several")
    add("--mbit", type=float, nargs="+", default=[1000, 10_000, 25_000], help="0: unlimited")
    add("--model", nargs="+", choices=STEP_MS, default=list(STEP_MS))
    methods = ["cast", "qsgd", "topk", "powersgd:rank=2"]
    add("--methods", nargs="+", default=methods, help="of advise --gpu")
    add("--rounds", type=int, default=2, help="turns of each method")
    add("--steps", type=int, default=5, help="measured steps of a turn")
    add("--check", action="store_true", help="beside trainings whose computation is slept")
    add("--plot", action="store_true", help="run nothing, and draw the newest results")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    if options.plot:
        plot()
        return
    check_privileges("The replay")
    found, text = [], ""
    for model in options.model:
        for workers in options.workers:
            for mbit in options.mbit:
                arguments = ["--worker", f"--rounds={options.rounds}", f"--steps={options.steps}"]
                arguments += ["--model", model, "--methods", *options.methods]
                arguments += ["--check"] if options.check else []
                link = Link(mbit)
                with network(workers, link) as spaces:
                    first = launch(__file__, arguments, spaces, timeout=3000)[0]
                found.append({"model": model, "workers": workers, "link": str(link), **first})
                if options.check:
                    table = compared(first["pairs"])
                else:
                    table = markdown(COLUMNS[:-1], [row[:-1] for row in cells(first["rows"])])
                step = f"{STEP_MS[model]:g} ms a step"
                head = f"## {model}, {step}, {workers} workers, {link}"
                rate = f"A large all-reduce has {first['gbps']:.1f} Gbit/s."
                part = f"{head}\n\n{rate}\n\n{table}"
                dated_page.say(part)
                text += f"{part}\n"
    name = "replay_check" if options.check else "replay"
    words = "Replays beside trainings" if options.check else "Steps of GPUs, replayed"
    hook = " Over Gloo the trainings use torch's fp16 hook, which sends as many bytes."
    head = f"""{dated_page.title(words)}

`{" ".join(["python benchmarks/replay.py", *sys.argv[1:]])}` with {dated_page.versions("torch")},
{os.cpu_count()} CPUs. Medians of {options.rounds} x {options.steps} steps.{hook * options.check}

"""
    dated_page.write(options.out, name, head + text, found)


if __name__ == "__main__":
    main()
