"""What a bucket costs the host of a GPU, measured on a machine without a GPU.

Triton's own run-time starts the kernels, over a driver that does nothing (``driver_stub``). Tensors
are on ``meta``: torch makes and cuts them in C++, and nothing is computed. Not in the figures: the
driver's own 2 to 4 µs a launch, CUDA's allocator (0.5 µs an allocation more than here),
collectives, streams and DDP's hook.

A bucket has 6.5 million elements in nine parameters, of one worker. It is compressed, laid out as a
message, and decoded. Each row has the microseconds of a bucket as it is written with Triton's own
launches, with prepared launches, and recorded; what the recorded launches alone take; and how many
calls of Python's functions a bucket makes.

    python benchmarks/launch_cost.py --methods "TopK(0.01)" --profile
"""

from __future__ import annotations

import argparse
import cProfile
import math
import os
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core import Exchange
from lightning_gc.core.flow import resume
from lightning_gc.engine import Engine, recorded_exchange
from lightning_gc.methods.text_table import markdown
from tests.support import counted_waits, driver_stub

META = torch.device("meta")
METHODS: dict[str, Compressor] = {
    "Identity()": gc.Identity(),
    "Cast()": gc.Cast(),
    "QSGD(4)": gc.QSGD(4),
    "EFSignSGD()": gc.EFSignSGD(),
    "RandomK(0.01)": gc.RandomK(0.01),
    "TopK(0.01)": gc.TopK(0.01),
    "ChunkedTopK()": gc.ChunkedTopK(),
    "PowerSGD(2)": gc.PowerSGD(2),
    "Quantised(ChunkedTopK(), BinMeans(2))": gc.Quantised(gc.ChunkedTopK(), gc.BinMeans(2)),
}
HEADER = (
    *("method", "kernels", "Triton's launches", "prepared", "recorded", "launches alone"),
    *("calls as written", "calls recorded"),
)


class Bucket:
    """One worker's exchange of one bucket with itself."""

    def __init__(self, compressor: Compressor, parameters: int = 9, numel: int = 6_500_000) -> None:
        rows = max(1, numel // parameters // 768)
        self.shapes = {f"p{i}": (rows, 768) for i in range(parameters)}
        self.engine = Engine(by_default(compressor))
        self.grad = torch.empty(sum(map(math.prod, self.shapes.values())), device=META)

    def __call__(self) -> None:
        flow = self.engine.flow(self.grad, self.shapes)
        request = next(flow, None)
        while request is not None:
            if isinstance(request, gc.core.Gather | Exchange):
                own = request.payloads[0] if isinstance(request, Exchange) else request.tensors
                request = resume(flow, [list(own)])
            else:
                request = resume(flow, list(request.tensors))
        self.engine.advance()


def record(bucket: Bucket) -> None:
    """Run a bucket until it is recorded, or as often as that is tried."""
    for _ in range(recorded_exchange.TRIES + 2):
        bucket()


def microseconds(function: Callable[[], Any], rounds: int) -> float:
    """Return the least of the means of 15 batches: other processes only add to it."""
    batch, times = max(1, rounds // 15), []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(batch):
            function()
        times.append((time.perf_counter() - start) / batch)
    return 1e6 * min(times)


def calls(function: Callable[[], Any]) -> int:
    """Return how many functions a call enters, of Python and of C."""
    profile = cProfile.Profile()
    profile.enable()
    function()
    profile.disable()
    found: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return found


def row(name: str, stub: driver_stub.Stub, rounds: int, *, profile: bool) -> list[str]:
    """Measure one method."""
    from lightning_gc.kernels.gpu import prepared_launch

    cells, counted = [name], list[int]()
    tries, recorded_exchange.TRIES = recorded_exchange.TRIES, -1
    for trusted in (False, True):
        prepared_launch._trusted = trusted
        bucket = Bucket(METHODS[name])
        for _ in range(5):
            bucket()
        before = stub.launches
        bucket()
        kernels = stub.launches - before
        cells.append(f"{microseconds(bucket, rounds):.0f}")
        counted.append(calls(bucket))
    recorded_exchange.TRIES = tries
    bucket = Bucket(METHODS[name])
    record(bucket)
    cells.append(f"{microseconds(bucket, rounds):.0f}")
    counted.append(calls(bucket))
    known = [each.recorded for each in bucket.engine._recordings._known.values()]
    if known and known[0] is not None:
        spans = [known[0].opening, *known[0].exchange, known[0].closing]
        cells.append(f"{microseconds(lambda: [span.start(1) for span in spans], rounds):.1f}")
    else:
        cells.append("not recorded")
    if profile:
        watched = cProfile.Profile()
        watched.enable()
        for _ in range(100):
            bucket()
        watched.disable()
        pstats.Stats(watched).sort_stats("tottime").print_stats(30)
    return [cells[0], str(kernels), *cells[1:], str(counted[1]), str(counted[2])]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--profile", action="store_true", help="show where the calls are")
    options = parser.parse_args(arguments)
    stub = driver_stub.in_new_folder()
    from lightning_gc.kernels.gpu import prepared_launch

    gc.core.Bucket.generator = counted_waits.generator  # torch has none for meta
    prepared_launch.equal = lambda one, other: True  # nothing is computed on meta
    with torch.no_grad():
        rows = []
        for name in options.methods:
            rows.append(row(name, stub, options.rounds, profile=options.profile))
            print(" ".join(rows[-1]), flush=True)
    print(markdown(HEADER, rows))


if __name__ == "__main__":
    main()
