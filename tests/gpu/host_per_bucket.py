"""Milliseconds of the host for one bucket on this GPU, one line for each method.

    python -m tests.gpu.host_per_bucket

A bucket has 6.5 million elements in nine parameters, of one worker. It is compressed, laid out as a
message, and decoded, without a transport. The host's time ends when all work is queued. It is the
median of 40 buckets, each of which the GPU finishes before the next one begins. The figures are
those of an exchange as it is written with Triton's launches, the same with prepared launches, and
of a recorded exchange.
"""

import statistics
import sys
import time

import torch

from tests.support.launch_cost import METHODS, WAYS, LoneBucket, run_in

DEVICE = torch.device("cuda")
BUCKETS = 40
WORDS = ("by Triton", "prepared", "recorded")


def milliseconds(bucket: LoneBucket) -> float:
    """Return the host's time for a bucket."""
    times = []
    for _ in range(BUCKETS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        bucket()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def line(name: str) -> str:
    """Measure one method."""
    cells = []
    for way, words in zip(WAYS, WORDS, strict=True):
        with way():
            bucket = run_in(name, DEVICE)
            cells.append(f"{milliseconds(bucket):.3f} {words}")
    if bucket.recorded is None:
        cells[-1] += " (it is not)"
    return f"{name}: {', '.join(cells)}"


def main() -> None:
    """Measure all methods."""
    if not torch.cuda.is_available():
        sys.exit("This needs a GPU; without one there is benchmarks/launch_cost.py.")
    with torch.no_grad():
        for name in METHODS:
            sys.stdout.write(f"{line(name)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"milliseconds of the host for a bucket, {len(METHODS)} methods\n")


if __name__ == "__main__":
    main()
