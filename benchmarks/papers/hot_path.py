"""What compression costs on a CPU, beside one copy of the tensor, and how large payloads are.

One thread, 25 million float32 by default. Every measurement stands between two copies, and its
ratio is to the mean of these two; shown is the median, for memory is not equally fast all the
time. Sizes stand beside what the format promises, and beside the entropy of which elements were
chosen, below which no coding gets without knowing more. Prints tables and writes a dated file.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import dated_page
import torch

from lightning_gc import QSGD, HardThreshold, TopK
from lightning_gc.compressors import Codec
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.text_table import markdown

DENSITY = 0.01
REACHED = 2.5758  # by 1 % of the magnitudes of normal numbers
CODECS: dict[str, Codec] = {
    "TopK(0.01)": TopK(DENSITY),
    'TopK(0.01, selection="sampled")': TopK(DENSITY, selection="sampled"),
    'TopK(0.01, value_dtype="bfloat16")': TopK(DENSITY, value_dtype="bfloat16"),
    "HardThreshold, 1 %": HardThreshold(REACHED),
    "QSGD(4)": QSGD(4),
}


class Bench:
    """A gradient, an error, and a clock.

    Args:
        numel: their length.
        repeats: of each measurement.
    """

    def __init__(self, numel: int, repeats: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.repeats = repeats
        self.before = torch.randn(numel, generator=draw)  # the error that each round begins with
        self.error = self.before.clone()
        self.gradient = 0.01 * torch.randn(numel, generator=draw)
        self.out = torch.zeros(numel)
        self.bucket = Bucket(self.gradient, {"weight": (numel,)})

    def compensated(self) -> torch.Tensor:
        """Return error plus gradient, in the error's storage."""
        return self.error.add_(self.gradient)

    def times_a_copy(self, action: Callable[[], Any]) -> str:
        """Return the median of an action's time over that of the copies around it."""
        ratios = []
        for _ in range(self.repeats):
            before, during, after = self._copy(), _time(action), self._copy()
            ratios.append(during / ((before + after) / 2))
        return f"{statistics.median(ratios):.2f}"

    def _copy(self) -> float:
        return _time(lambda: self.error.copy_(self.before))


def _time(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(bench: Bench) -> tuple[str, str]:
    """Return the tables of times and of sizes."""
    numel, k = bench.out.numel(), round(DENSITY * bench.out.numel())

    def plain() -> None:
        torch.topk(bench.compensated().abs(), k, sorted=False)

    times = [["`torch.topk` of the sum, nothing else", bench.times_a_copy(plain), ""]]
    sizes = []
    for name, codec in CODECS.items():
        bench.error.copy_(bench.before)
        payload = codec.encode(bench.compensated(), bench.bucket)
        sent = codec.sent(payload, numel)
        nbytes = sum(part.nbytes for part in payload)
        sizes.append([f"`{name}`", f"{sent:,}", f"{nbytes:,}", f"{8 * nbytes / sent:.2f}"])
        promised, entropy = bits(codec, payload, numel, sent)
        sizes[-1] += [f"{promised:.2f}", f"{entropy:.2f}"]

        def send(codec: Codec = codec) -> None:
            codec.encode(bench.compensated(), bench.bucket)

        def receive(codec: Codec = codec, payload: Any = payload) -> None:
            codec.decode(payload, bench.out, 0.5, bench.bucket)

        times.append([f"`{name}`", bench.times_a_copy(send), bench.times_a_copy(receive)])
    head = ("copies", "compensate, select, clear, code", "decode and accumulate a payload")
    columns = ("bits for each sent element", "sent", "bytes", "bits", "documented", "entropy bound")
    return markdown(head, times), markdown(columns, sizes)


def bits(codec: Codec, payload: Any, numel: int, sent: int) -> tuple[float, float]:
    """Return what the docstring says of an element's bits, and values plus entropy of positions."""
    if isinstance(codec, QSGD):
        return codec.bits + 32 / codec.block_size, codec.bits
    value, p = 8 * payload[0].element_size(), sent / numel
    entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p)
    return value + 2 - math.log2(p), value + entropy


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--numel", type=int, default=25_000_000, help="elements (default: %(default)s)")
    add("--repeats", type=int, default=15, help="(default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times, sizes = measure(Bench(options.numel, options.repeats))
    versions = f"{dated_page.versions('torch', 'numpy')}, {os.cpu_count()} CPUs"
    text = f"""{dated_page.title("The hot path on a CPU")}

`python benchmarks/papers/hot_path.py` with {versions}: {options.numel:,} float32, one thread.
Times are multiples of one `copy_` of the tensor, medians of {options.repeats}.

{times}
{sizes}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "hot_path", text)


if __name__ == "__main__":
    main()
