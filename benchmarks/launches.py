"""Operations that one worker starts on a GPU in a step, counted on a machine without a GPU.

Two tables. The first has real models: launches per step and per bucket, bytes that pass through
memory per element, and waits of the host. The second cuts one bucket of 2^20 elements into 1, 8 and
64 parameters: the launches of a bucket should not depend on the number of its parameters. Prints
the tables and writes a dated page. How launches are counted: ``tests/support/launches.py``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import dated_page
import torch

import lightning_gc as gc
from lightning_gc.advice.description import MODELS
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.exchange.bucketing import DEFAULT_CAPS, layout
from lightning_gc.methods.text_table import markdown

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support import launch_cost
from tests.support.launches import Counts, Shapes, launches

METHODS: dict[str, gc.Compressor] = {
    **launch_cost.METHODS,
    "TopK(0.01), bfloat16": gc.TopK(0.01, "bfloat16"),
    "TopK(0.01), sampled": gc.TopK(0.01, selection="sampled"),
    "HardThreshold(0.03)": gc.HardThreshold(0.03),
    "Quantised(TopK, QSGD)": gc.Quantised(gc.TopK(0.01), gc.QSGD(4, 64)),
}
CUTS = (1, 8, 64)


DIVISORS = {"gpt2": 64, "resnet50": 8, "llama-1b": 256}
"""Model -> by how much the first dimension of matrices is divided to save time.

Buckets are cut from the undivided shapes, so the number of parameters per bucket is unchanged.
"""


def buckets(model: str) -> list[Shapes]:
    """Return the shapes in each of DDP's buckets, with the first dimensions divided."""
    full, divisor = MODELS[model](), DIVISORS[model]
    names = list(full)[::-1]
    cuts = layout([4 * math.prod(full[name]) for name in names], DEFAULT_CAPS)

    def divided(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if len(shape) == 1 else (max(2, shape[0] // divisor), *shape[1:])

    return [{names[i]: divided(full[names[i]]) for i in cut} for cut in cuts]


def cut(parameters: int) -> list[Shapes]:
    """Return one bucket of 2^20 elements with so many equal parameters."""
    return [{f"p{i}": (16, (1 << 16) // parameters) for i in range(parameters)}]


def row(counts: Counts, number: int) -> list[str]:
    """Return launches of a step and of a bucket, bytes per element and waits, as text."""
    per_bucket = f"{counts.total / number:.0f}"
    return [f"{counts.total:,}", per_bucket, f"{counts.bytes_per_element:.0f}", str(counts.waits)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--models", nargs="*", choices=MODELS, default=list(MODELS), metavar="MODEL")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    add("--workers", nargs="+", type=int, default=[2, 8], metavar="W")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, growth = [], []
    for method in options.methods:
        compressor = by_default(METHODS[method])
        by_cut = [launches(compressor, cut(number), 2) for number in CUTS]
        waits = "/".join(str(each.waits) for each in by_cut)
        growth.append([method, *(str(each.total) for each in by_cut), waits])
        sys.stderr.write(f"{' '.join(growth[-1])}\n")
        for model in options.models:
            for workers in options.workers:
                shapes = buckets(model)
                counts = launches(compressor, shapes, workers)
                rows.append([model, method, str(workers), *row(counts, len(shapes))])
                sys.stderr.write(f"{' '.join(rows[-1])}\n")
    head = ("model", "method", "W", "launches", "per bucket", "bytes per element", "host waits")
    grown = ("method", *(f"{number} parameters" for number in CUTS), "host waits")
    text = f"""{dated_page.title("Operations started on a GPU in a step")}

`python benchmarks/launches.py` with {dated_page.versions("torch")}, on a machine without a GPU:
one worker's second step, with the default memory and scheme. A launch is a Triton kernel, a
collective, or an operation of torch that is neither a view nor an allocation. Some operations of
torch start several kernels. Bytes count operands and results.

{markdown(head, sorted(rows), left=("model", "method"))}
## One bucket of 2^20 elements, cut into parameters, W = 2

{markdown(grown, growth, left=("method",))}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "launches", text)


if __name__ == "__main__":
    main()
