"""Predicted beside measured seconds of an exchange, on links that differ by direction.

Workers are processes in network namespaces, whose ways out and in are shaped apart. Each probes the
link as ``lightning-gc advise`` does, times each method's computation as it does, and predicts an
exchange. Then all exchange for real. A second table has bare requests in which one worker sends
ten times as much as the others, or receives that: there the direction decides. Needs Linux, root
and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from dated_page import say
from namespaces import Link, check_privileges, launch, network

from lightning_gc import QSGD, AllGather, Cast, HardThreshold, TopK, TwoShot
from lightning_gc.advice.link_probe import directions, probe
from lightning_gc.advice.traces import Shapes, engines, gradient, trace
from lightning_gc.core import Exchange
from lightning_gc.methods.text_table import markdown
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.link import fit_with_knee, with_directions

SHAPES: Shapes = {"weight": (1024, 1024)}
METHODS = {
    "Cast()": Cast(),
    "QSGD(4)": QSGD(4),
    "TopK(0.05), bfloat16": TopK(0.05, value_dtype="bfloat16"),
    "HardThreshold(2.5)": HardThreshold(2.5),
}
SCHEMES = {"AllGather": AllGather(), "TwoShot": TwoShot()}
MUCH, LITTLE = 1 << 20, (1 << 20) // 10
UNEVEN = {"one sends ten times as much": True, "one receives ten times as much": False}


def work(repeats: int) -> dict[str, Any]:
    """Predict and measure in one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    transport, device = Distributed(), torch.device("cpu")
    me, workers = transport.worker, transport.workers
    began = time.perf_counter()
    fitted = {kind: fit_with_knee(found) for kind, found in probe(transport, device).items()}
    ways = directions(transport, device, fitted["Exchange"].gbps)
    links = with_directions(fitted, *(min(each) for each in zip(*ways, strict=True)))
    found: dict[str, Any] = {
        "probing": time.perf_counter() - began,
        "ways": ways,
        "links": {kind: asdict(link) for kind, link in links.items()},
        "rows": {},
    }
    rows, flat = found["rows"], gradient(SHAPES, me)
    for method, compressor in METHODS.items():
        for name, scheme in SCHEMES.items():
            dist.barrier()
            trace(compressor, scheme, SHAPES, workers, 1)  # makes kernels
            traced = trace(compressor, scheme, SHAPES, workers, 1)
            dist.barrier()
            took = []
            for _ in range(repeats):  # the second step of each: lengths change with the errors
                (engine,) = engines(compressor, scheme, workers, [me])
                recording = Recording(transport)

                def exchange(engine: Any = engine, recording: Recording = recording) -> None:
                    own = flat.clone()
                    with torch.no_grad():
                        recording.run(engine.flow(own, SHAPES), own.device)
                    engine.advance()

                took.append(_median(exchange, 1))
            seconds = statistics.median(took)
            rows[f"{method}, {name}"] = (traced.takes(links), seconds)
    for name, sends in UNEVEN.items():
        outgoing, sent, received = _uneven(sends, me, workers)

        def request(outgoing: Exchange = outgoing) -> None:
            transport.fulfil(outgoing)

        predicted = links["Exchange"].seconds(workers - 1, sent, received)
        rows[name] = (predicted, _median(request, repeats))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _uneven(sends: bool, me: int, workers: int) -> tuple[Exchange, float, float]:
    """Return a request, and the most bytes that a worker sends in it and receives."""
    others = workers - 1
    sizes = [
        [0 if i == j else MUCH if (i if sends else j) == 0 else LITTLE for j in range(workers)]
        for i in range(workers)
    ]
    payload = torch.zeros(MUCH, dtype=torch.uint8)
    request = Exchange(tuple((payload[:size],) for size in sizes[me]), (MUCH,))
    busiest, other = others * MUCH, MUCH + (others - 1) * LITTLE
    return (request, busiest, other) if sends else (request, other, busiest)


def _median(action: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(1 + repeats):  # the first one makes buffers
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def errors(rows: dict[str, tuple[float, float]]) -> list[float]:
    """Return the relative errors of predictions."""
    return [predicted / measured - 1 for predicted, measured in rows.values()]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4])
    add("--links", nargs="+", default=["20/200", "200/20", "50/50"], help="Mbit/s up/down")
    add("--repeats", type=int, default=3)
    add("--out", type=Path, default=dated_page.RESULTS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.out.write_text(json.dumps(work(options.repeats)))
        return
    check_privileges("The benchmark of directions")
    kept, parts, summary = [], [], []
    for workers in options.workers:
        for text in options.links:
            up, down = map(float, text.split("/"))
            arguments = ["--worker", f"--repeats={options.repeats}"]
            with network(workers, Link(up, down_mbit=down)) as spaces:
                answers = launch(__file__, arguments, spaces, timeout=900)
            # As advise: the slowest worker's computation, and all wait for all.
            rows = {
                name: tuple(max(answer["rows"][name][i] for answer in answers) for i in (0, 1))
                for name in answers[0]["rows"]
            }
            kept.append({"workers": workers, "up": up, "down": down, "rows": rows} | answers[0])
            ways = "; ".join(f"{1e3 * a:.3g} up, {1e3 * b:.3g} down" for a, b in answers[0]["ways"])
            link = f"{workers} workers, {up:g} Mbit/s up, {down:g} down"
            lines = [
                [name, f"{said:.3f}", f"{took:.3f}", f"{said / took - 1:+.0%}"]
                for name, (said, took) in rows.items()
            ]
            columns = (link, "s predicted", "s measured", "error")
            part = f"{markdown(columns, lines)}\nMeasured per worker, in Mbit/s: {ways}.\n"
            say(part)
            parts.append(part)
            of_all = [
                errors({n: row for n, row in rows.items() if (n in UNEVEN) == uneven})
                for uneven in (False, True)
            ]
            summary.append([link, *(_worst(each) for each in of_all)])
    table = markdown(("", "methods, median and worst error", "uneven requests"), summary)
    head = (
        f"{dated_page.title('Links that differ by direction')}\n\n"
        f"`python benchmarks/directions.py {' '.join(sys.argv[1:])}`, {os.cpu_count()} CPUs, "
        f"{dated_page.versions('lightning-gc', 'torch')}. Medians of {options.repeats}, of the "
        f"slowest worker. One tensor of {1024 * 1024:,} elements.\n\n"
    )
    body = "\n".join(parts)
    stem = dated_page.write(options.out, "directions", f"{head}{table}\n{body}", kept)
    say(f"{table}\n{stem}.md")


def _worst(found: list[float]) -> str:
    sizes = [abs(error) for error in found]
    return f"{statistics.median(sizes):.0%}, {max(sizes):.0%}"


if __name__ == "__main__":
    main()
