"""Measure the costs that ``lightning-gc advise --params ...`` ships, or check its predictions.

Measures one worker's computation and messages for every method that ``advise`` tries, one thread,
for square matrices of several sizes and 2, 3, 4 and 6 simulated workers. The least seconds of
several repeats are kept. Costs on a GPU are taken from a page of ``gpu_step.py``. The result
is ``lightning_gc/advice/shipped_costs.json``.

``--check FILE`` predicts the runs of a page of ``network.py`` from the shipped costs, and writes a
dated page with predicted and measured seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dated_page
import torch
from models import build

import lightning_gc
from lightning_gc.advice.costs import FEW, SEEN
from lightning_gc.advice.description import LATENCY_US, gpt2
from lightning_gc.advice.prediction import METHODS, WHOLE
from lightning_gc.advice.traces import Shapes, Trace, trace
from lightning_gc.advice.what_if import WhatIf
from lightning_gc.compressors import Identity
from lightning_gc.methods.method import parse_method
from lightning_gc.methods.text_table import markdown
from lightning_gc.schemes import AllReduce
from lightning_gc.transports.link import Link

OUT = Path(lightning_gc.__file__).parent / "advice" / "shipped_costs.json"
SIDES = (32, 128, 512, 1_024, 2_048)
WORKERS = sorted({*range(2, FEW + 1), *SEEN})
ON_GPU = {
    "cast": "Cast()",
    "qsgd": "QSGD(4)",
    "topk": "TopK(0.01)",
    "powersgd:rank=2": "PowerSGD(2)",
    WHOLE: "Identity()",
    "plain DDP": "plain DDP",
    "no synchronisation": "no synchronisation",
}
"""Name in the shipped costs -> row of the page about the GPU."""
IN_NETWORK = {
    "cast": "Cast()",
    "qsgd": "QSGD(4)",
    "topk": "TopK(0.01)",
    "topk:value_dtype=bfloat16": "TopK(0.01), bfloat16",
    "topk:value_dtype=bfloat16,scheme=two_shot": "TopK(0.01), bfloat16, TwoShot",
    "powersgd:rank=2": "PowerSGD(2)",
    "plain DDP": "plain DDP",
}
"""Name in a prediction -> row of the page about networks."""


def measured(name: str, workers: int, side: int) -> Trace:
    """Return the trace of one square matrix."""
    shapes: Shapes = {"matrix": (side, side)}
    if name == WHOLE:
        return trace(Identity(), AllReduce(), shapes, workers, 2)
    method = parse_method(name)
    memory, scheme = method.memory_and_scheme()
    return trace(method.make_compressor({}), scheme, shapes, workers, 2, memory=memory)


def least(found: Sequence[Trace]) -> Trace:
    """Return the trace with the least seconds before, between and after the requests."""
    return replace(found[-1], seconds=tuple(map(min, *(each.seconds for each in found))))


def plain_values(found: Trace) -> dict[str, Any]:
    """Return a trace as the file holds it."""
    asked = [[a.kind, round(a.nbytes, 1), a.collectives, a.lengths] for a in found.asked]
    return {"asked": asked, "seconds": [float(f"{second:.3g}") for second in found.seconds]}


def cpu() -> str:
    """Return the processor's name and number of cores."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return f"{found[1] if found else platform.machine()} with {os.cpu_count()} cores"


def gpu_costs(page: Path) -> dict[str, Any]:
    """Return the GPU's milliseconds of a step of GPT-2 that a page of ``gpu_step.py`` has."""
    text = page.read_text()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    place = next(i for i, name in enumerate(rows[0]) if name.startswith("ms"))
    known = {row[0]: row[place] for row in rows}
    first = text.partition(" on ")[2].partition(":")[0]
    return {
        "machine": f"{' '.join(first.split())} (benchmarks/results/{page.name})",
        "parameters": sum(math.prod(shape) for shape in gpt2().values()),
        "step_ms": {name: float(known[row]) for name, row in ON_GPU.items()},
    }


def ship(repeats: int, gpu_page: Path, more: bool) -> None:
    """Measure and write the file. Repeats are far apart, since other load comes and goes."""
    cells = [(n, w, side) for n in (WHOLE, *METHODS) for w in WORKERS for side in SIDES]
    found: dict[tuple[str, int, int], list[Trace]] = {cell: [] for cell in cells}
    for number in range(1, repeats + 1):
        for cell in cells:
            found[cell].append(measured(*cell))
        dated_page.say(f"repeat {number} of {repeats}")
    methods = {
        name: {
            str(workers): [plain_values(least(found[name, workers, side])) for side in SIDES]
            for workers in WORKERS
        }
        for name in (WHOLE, *METHODS)
    }
    if more:
        known = json.loads(OUT.read_text())["methods"]
        for name, workers, side in cells:
            number = SIDES.index(side)
            new = methods[name][str(workers)][number]
            old = known[name][str(workers)][number]
            new["seconds"] = list(map(min, old["seconds"], new["seconds"]))
    machine = f"one core of {cpu()}, {dated_page.versions('torch')}, {datetime.date.today()}"
    facts = {
        "machine": machine,
        "sizes": [side**2 for side in SIDES],
        "methods": methods,
        "gpu": gpu_costs(gpu_page),
    }
    OUT.write_text(json.dumps(facts) + "\n")


def compared(path: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yield case, method, and predicted and measured seconds of a step of ``network.py``."""
    for run in json.loads(path.read_text()):
        rows = {name: row["seconds"] for name, row in run["rows"].items()}
        number, unit = run["link"].split()
        shapes = {n: tuple(p.shape) for n, p in build(run["model"], 1, 0)[0].named_parameters()}
        gbps = float(number) * (1.0 if unit == "Gbit/s" else 1e-3)
        link = Link(gbps, LATENCY_US)
        case = WhatIf(shapes, rows["no synchronisation"], run["workers"], link)
        predicted = {row.name: row.seconds for row in case.rows()}
        for name, row in IN_NETWORK.items():
            if row in rows:
                where = f"{run['model']}, {run['workers']} workers, {run['link']}"
                yield where, name, predicted[name], rows[row]


def check(path: Path, out: Path) -> None:
    """Compare predictions with measurements, print and write a page."""
    found = list(compared(path))
    cells = [
        [where, name, f"{ours:.4f}", f"{real:.4f}", f"{ours / real:.2f}"]
        for where, name, ours, real in found
    ]
    dense = {where: (ours, real) for where, name, ours, real in found if name == "plain DDP"}
    lines = []
    for workers in sorted({where.split(", ")[1] for where, *_ in found}):
        some = [(where, o / r) for where, _, o, r in found if workers in where]
        errors = {
            "seconds": [ratio for _, ratio in some],
            "speed relative to plain DDP": [
                ratio * dense[where][1] / dense[where][0] for where, ratio in some
            ],
        }
        for what, ratios in errors.items():
            off = [math.exp(abs(math.log(ratio))) for ratio in ratios]
            lines.append(
                f"{workers}, {what}: off by a factor of {statistics.median(off):.2f} in the median "
                f"of {len(off)}, {max(off):.2f} at worst."
            )
    head = ("run", "method", "s predicted", "s measured", "predicted / measured")
    text = f"""{dated_page.title("Predictions from shipped costs")}

`python benchmarks/shipped_costs.py --check {path.name}`: seconds of a step as `lightning-gc advise`
predicts them without a project, from the step without synchronisation and the shipped costs. The
measured seconds are from `{path.name}`: all workers share two cores.

{chr(10).join(f"- {line}" for line in lines)}

{markdown(head, cells, left=("run", "method"))}"""
    sys.stdout.write(text)
    dated_page.write(out, "shipped_costs", text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="of each measurement (default: %(default)s)")
    add("--more", action="store_true", help="keep the file's seconds where they are less")
    page = dated_page.RESULTS / "gpu_step_20261126.md"
    add("--gpu-page", type=Path, default=page, help="of gpu_step.py (default: %(default)s)")
    add("--check", type=Path, metavar="FILE", help="figures of network.py, as JSON")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.check is None:
        ship(options.repeats, options.gpu_page, options.more)
    else:
        check(options.check, options.out)


if __name__ == "__main__":
    main()
