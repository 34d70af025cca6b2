"""How near each request comes to what a link allows, beside torch's own collectives.

Workers are processes in network namespaces, joined by shaped links. Shown is the median time of a
request over the time that its bytes take at the link's nominal speed; below 1 what is sent fits
into buffers. A second table has milliseconds of an all-gather in which the last worker's message is
ten times as long as the others': padded to the longest, sent to each other worker by itself or by
torch's all-to-all, and as `Distributed` does it. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import Link, check_privileges, launch, network

from lightning_gc.core.flow import Exchange, Gather, Mean
from lightning_gc.methods.text_table import markdown
from lightning_gc.transports import Distributed
from lightning_gc.transports.p2p import swap

SIZES = (137_000, 1_100_000, 4_450_000)  # bytes of a payload: TopK's, QSGD's, bfloat16's of an LSTM


def actions(nbytes: int, workers: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Return, by name, what to time, and the bytes that one worker sends in it."""
    transport, others = Distributed(), workers - 1
    own = torch.zeros(nbytes // 8 * 8, dtype=torch.uint8)
    row, all_rows = own.repeat(workers), own.repeat(workers)
    single = torch.zeros(nbytes // 4)
    return {
        "Mean": (lambda: transport.fulfil(Mean((single,))), 2 * others / workers * nbytes),
        "Gather": (lambda: transport.fulfil(Gather((own,))), others * nbytes),
        "torch's all-gather": (
            lambda: dist.all_gather(list(all_rows.view(workers, -1)), own),
            others * nbytes,
        ),
        "Exchange": (lambda: transport.fulfil(Exchange(((own,),) * workers)), others * nbytes),
        "torch's all-to-all": (lambda: dist.all_to_all_single(all_rows, row), others * nbytes),
    }


def uneven(nbytes: int, workers: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Return ways to gather a message of ``nbytes`` and others of a tenth, with bytes received."""
    transport, me = Distributed(), dist.get_rank()
    sizes = [nbytes // 10 // 16 * 16] * (workers - 1) + [nbytes // 16 * 16]
    own, longest = torch.zeros(sizes[me], dtype=torch.uint8), max(sizes)
    padded, all_padded = own.new_zeros(longest), own.new_zeros(workers * longest)
    rows = own.new_zeros(sum(sizes))
    given = own.repeat(workers)
    request = Gather((own[:-8],), (longest,), [(size - 8,) for size in sizes])  # the seal is 8
    ways: dict[str, Callable[[], object]] = {
        "padded to the longest": lambda: dist.all_gather(list(all_padded.chunk(workers)), padded),
        "each to each": lambda: swap([own] * workers, rows.split(sizes), None),
        "torch's all-to-all": lambda: dist.all_to_all_single(
            rows, given, sizes, [sizes[me]] * workers
        ),
        "Gather": lambda: transport.fulfil(request),
    }
    return {name: (way, float(sum(sizes) - min(sizes))) for name, way in ways.items()}


Found = dict[str, dict[str, tuple[float, float]]]


def work(out: Path, repeats: int) -> None:
    """Measure in one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    tables: list[Found] = []
    for made in (actions, uneven):
        found: Found = {}
        for nbytes in SIZES:
            for name, (action, moved) in made(nbytes, dist.get_world_size()).items():
                seconds = []
                for _ in range(repeats):
                    dist.barrier()
                    began = time.perf_counter()
                    action()
                    if made is uneven:
                        dist.barrier()  # until the slowest has it
                    seconds.append(time.perf_counter() - began)
                found.setdefault(name, {})[f"{nbytes:,} bytes"] = statistics.median(seconds), moved
        tables.append(found)
    out.write_text(json.dumps(tables))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4])
    add("--mbit", type=float, nargs="+", default=[100, 1000])
    add("--repeats", type=int, default=7)
    add("--out", type=Path, help=argparse.SUPPRESS)  # of a worker
    options = parser.parse_args()
    if options.out:
        work(options.out, options.repeats)
        return
    check_privileges("The benchmark of links")
    for workers in options.workers:
        for mbit in options.mbit:
            link = Link(mbit)
            with network(workers, link) as spaces:
                answers = launch(__file__, [f"--repeats={options.repeats}"], spaces, timeout=300)
            requests, gathers = answers[0]
            lines = [
                [name, *(f"{s * mbit * 1e6 / 8 / sent:.2f}" for s, sent in row.values())]
                for name, row in requests.items()
            ]
            columns = [f"{workers} workers, {link}", *(f"{n:,} bytes" for n in SIZES)]
            print(markdown(columns, lines))  # noqa: T201
            lines = [
                [name, *(f"{1000 * s:.1f}" for s, _ in row.values())]
                for name, row in gathers.items()
            ]
            least = [(8000 * need / (mbit * 1e6)) for _, need in gathers["Gather"].values()]
            lines.append(["what the link needs", *(f"{each:.1f}" for each in least)])
            columns = [f"{workers} workers, {link}, ms", *(f"one of {n:,}" for n in SIZES)]
            print(markdown(columns, lines))  # noqa: T201


if __name__ == "__main__":
    main()
