"""Measure what a bucket costs the host of a GPU, on a machine without a GPU.

Triton's own run-time starts the kernels, over a driver that does nothing (``driver_stub``). Tensors
are on ``meta``: torch makes and cuts them in C++, and nothing is computed. Not in the figures: the
driver's own 2 to 4 µs a launch, CUDA's allocator (0.5 µs an allocation more than here),
collectives, streams and DDP's hook. It needs gcc.

A bucket has 6.5 million elements in nine parameters, of one worker. It is compressed, laid out as a
message, and decoded. Each row has the microseconds of a bucket as it is written with Triton's own
launches, with prepared launches, and recorded. Then it has the time of the recorded launches alone,
and how many functions a bucket calls: all, all recorded, and those of this library in float32 and
in bfloat16. Of the latter torch's operations are recorded, which on meta call Python of torch.

    python benchmarks/launch_cost.py --methods "TopK(0.01)" --profile
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import dated_page
import torch

from lightning_gc.methods.text_table import markdown
from tests.support import launch_cost
from tests.support.launch_cost import METHODS, LoneBucket

HEADER = (
    *("method", "kernels", "Triton's launches, µs", "prepared, µs", "recorded, µs"),
    *("launches alone, µs", "calls as written", "calls recorded", "ours", "ours, bfloat16"),
)


def microseconds(function: Callable[[], Any], rounds: int) -> float:
    """Return the least of the means of 15 batches: other processes only add to it."""
    batch, times = max(1, rounds // 15), []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(batch):
            function()
        times.append((time.perf_counter() - start) / batch)
    return 1e6 * min(times)


def row(name: str, rounds: int, *, profile: bool) -> list[str]:
    """Measure one method."""
    times, counts = list[float](), list[launch_cost.Cost]()
    for way in launch_cost.WAYS:
        with way() as bucket_of:
            bucket = bucket_of(name)
            counts.append(launch_cost.cost(bucket))
            times.append(microseconds(bucket, rounds))
    cells = [name, str(counts[0].launches), *(f"{each:.0f}" for each in times)]
    cells.append(_alone(bucket, rounds))
    if profile:
        watched = cProfile.Profile()
        watched.enable()
        for _ in range(100):
            bucket()
        watched.disable()
        pstats.Stats(watched).sort_stats("tottime").print_stats(30)
    with launch_cost.recorded() as bucket_of:
        half = bucket_of(name, dtype=torch.bfloat16)
        ours = str(launch_cost.cost(half).ours) if half.recorded else "not recorded"
    return [*cells, str(counts[1].calls), str(counts[2].calls), str(counts[2].ours), ours]


def _alone(bucket: LoneBucket, rounds: int) -> str:
    """Return the time of the recorded launches without anything else."""
    recorded = bucket.recorded
    if recorded is None:
        return "not recorded"
    spans = [recorded.opening, *recorded.exchange, recorded.closing]

    def launches() -> None:
        for span in spans:
            span.start(1)

    return f"{microseconds(launches, rounds):.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--profile", action="store_true", help="show where the calls are")
    parser.add_argument("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args(arguments)
    launch_cost.prepare()
    with torch.no_grad():
        rows = [row(name, options.rounds, profile=options.profile) for name in options.methods]
    text = f"""{dated_page.title("What a bucket costs the host of a GPU")}

`python benchmarks/launch_cost.py` with {dated_page.versions("torch", "triton")}, on a machine
without a GPU: one worker's bucket of 6.5 million elements in nine parameters. The driver, CUDA's
allocator and collectives are not included.

{markdown(HEADER, rows)}"""
    dated_page.say(text)
    dated_page.write(options.out, "launch_cost", text)


if __name__ == "__main__":
    main()
