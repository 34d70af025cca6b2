"""CPU time of compression in a step of real models' many tensors, in copies of the gradient.

One worker's engine: error memory, guard, selection or rounding, coding, and decoding what W workers
sent; no network and no model. Buckets are cut as DDP cuts them. CPU seconds of one thread stand
beside those of one ``copy_`` of every bucket, taken before and after; shown are medians. Prints a
table and writes a dated file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dated_page
import torch
from torch import nn

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.joint import WholeCodec
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core.flow import Flow
from lightning_gc.engine.engine import Engine
from lightning_gc.methods.text_table import markdown
from lightning_gc.transports.simulated import Simulated

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from images import resnet

THRESHOLD = 10.0  # a random walk of steps of deviation 1 that starts at 0 reaches it in 100 steps
METHODS: dict[str, Compressor] = {
    "Identity": gc.Identity(),
    "TopK(0.01)": gc.TopK(0.01),
    "TopK, sampled, bf16": gc.TopK(0.01, "bfloat16", "sampled"),
    "HardThreshold, 1 %": gc.HardThreshold(THRESHOLD),
    "QSGD(4)": gc.QSGD(4),
    "Cast": gc.Cast(),
    "PowerSGD(2)": gc.PowerSGD(2),
    "EFSignSGD": gc.EFSignSGD(),
    "RandomK(0.01)": gc.RandomK(0.01),
    "ChunkedTopK": gc.ChunkedTopK(),
    "1.6 % of 2 bits": gc.Quantised(gc.ChunkedTopK(), gc.BinMeans(2)),
    "Int8": gc.Int8(),
}
FIRST, CAP = 1 << 20, 25 << 20  # bytes of DDP's first bucket and of the others
SHIFTS = 4_096
Shapes = Mapping[str, tuple[int, ...]]


def lstm(words: int, hidden: int) -> nn.Module:
    """Return an embedding and two LSTM layers; the decoder is the embedding's."""
    parts = {"embedding": nn.Embedding(words, hidden), "lstm": nn.LSTM(hidden, hidden, 2)}
    return nn.ModuleDict({**parts, "bias": nn.ParameterList([torch.empty(words)])})


def gpt(words: int, width: int, layers: int, length: int) -> nn.Module:
    """Return GPT-2's parameters: tied embedding, learnt positions, pre-norm blocks."""

    def block() -> nn.Module:
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        norms = [nn.LayerNorm(width) for _ in range(2)]
        return nn.ModuleList([*norms, *(nn.Linear(*size) for size in sizes)])

    embeddings = [nn.Embedding(words, width), nn.Embedding(length, width)]
    return nn.ModuleList([*embeddings, *(block() for _ in range(layers)), nn.LayerNorm(width)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "demo": lambda: lstm(2_100, 128),
    "lstm": lambda: lstm(8_000, 200),
    "resnet18": lambda: resnet(3, 10, width=64, stages=4, blocks=2),
    "small_gpt": lambda: gpt(8_000, 384, 5, 256),
    "one_tensor": lambda: nn.Linear(5_000, 5_000, bias=False),
    "gpt2": lambda: gpt(50_257, 768, 12, 1_024),
}


def buckets(shapes: Shapes) -> list[Shapes]:
    """Cut parameters into buckets as DDP does: from the last one on, the first bucket small."""
    cut: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name in reversed(list(shapes)):
        nbytes = 4 * torch.Size(shapes[name]).numel()
        cut[-1][name] = shapes[name]
        size += nbytes
        if size >= (FIRST if len(cut) == 1 else CAP):
            cut.append({})
            size = 0
    return [bucket for bucket in cut if bucket]


class Step:
    """A step of W simulated workers, and the CPU time of the first one's parts.

    Args:
        module: whose parameters' gradients are exchanged: normal numbers of deviation 1, in every
            step others. Errors begin as they are when 1 % of them are sent in every step.
        compressor: wrapped as the strategy wraps it.
        workers: W.

    Attributes:
        seconds: part -> CPU seconds since the last ``run`` began: ``encode`` and ``decode`` of
            codecs, and ``all`` of the engine.
    """

    def __init__(self, module: nn.Module, compressor: Compressor, workers: int) -> None:
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.buckets = buckets(shapes)
        numels = [sum(torch.Size(s).numel() for s in bucket.values()) for bucket in self.buckets]
        draw = torch.Generator().manual_seed(0)
        self.before = [torch.randn(numel + SHIFTS, generator=draw) for numel in numels]
        self.grads = [[torch.empty(numel) for numel in numels] for _ in range(workers)]
        self.engines = [
            Engine(by_default(compressor), worker=worker, workers=workers)
            for worker in range(workers)
        ]
        self.seconds: dict[str, float] = {}
        self._worker = 0
        self.run()
        for engine in self.engines:
            for error in engine.errors().values():
                error.uniform_(-1, 1, generator=draw)
                error.add_(torch.empty_like(error).uniform_(-1, 1, generator=draw))
                error.mul_(THRESHOLD / 2)

    def run(self) -> None:
        """Exchange fresh gradients of all buckets."""
        self.seconds.clear()
        for index, shapes in enumerate(self.buckets):
            self.copy(index)
            flows = [
                self._timed(engine.flow(grads[index], shapes), worker)
                for worker, (engine, grads) in enumerate(zip(self.engines, self.grads, strict=True))
            ]
            Simulated(len(self.engines)).run(flows)
        for engine in self.engines:
            engine.advance()

    def copy(self, index: int) -> None:
        """Give all workers gradients of a bucket."""
        for worker, grads in enumerate(self.grads):
            start = (self.engines[0].step * len(self.grads) + worker) * 37 % SHIFTS
            grads[index].copy_(self.before[index][start : start + grads[index].numel()])

    def _timed(self, flow: Flow, worker: int) -> Flow:
        reply: Any = None
        while True:
            self._worker, began = worker, time.thread_time()
            try:
                request = flow.send(reply)
            except StopIteration:
                return
            finally:
                self.add("all", began)
            reply = yield request

    def add(self, part: str, began: float) -> None:
        """Count CPU time since ``began``, if the first worker is running."""
        if self._worker == 0:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - began

    @contextlib.contextmanager
    def parts(self) -> Iterator[None]:
        """Time codecs' ``send`` and ``receive``."""
        kept: dict[str, Callable[..., Any]] = {
            name: getattr(WholeCodec, name) for name in ("send", "receive")
        }
        for (name, method), part in zip(kept.items(), ("encode", "decode"), strict=True):
            setattr(WholeCodec, name, self._measured(method, part))
        try:
            yield
        finally:
            for name, method in kept.items():
                setattr(WholeCodec, name, method)

    def _measured(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.add(part, began)

        return measured


def measure(module: nn.Module, compressor: Compressor, workers: int, repeats: int) -> list[str]:
    """Return copies that a step takes, those of its encoding and its decoding, and milliseconds."""
    step = Step(module, compressor, workers)
    found: dict[str, list[float]] = {}
    step.run()  # fills caches
    with step.parts():
        for _ in range(repeats):
            before = _copies(step)
            step.run()
            copies = (before + _copies(step)) / 2
            parts = step.seconds | {"copies": copies}
            for part in ("all", "encode", "decode", "copies"):
                found.setdefault(part, []).append(parts.get(part, 0.0))
    copies = statistics.median(found.pop("copies"))
    middle = {part: statistics.median(values) for part, values in found.items()}
    ratios = [f"{middle[part] / copies:.1f}" for part in ("all", "encode", "decode")]
    return [*ratios, f"{1e3 * middle['all']:.1f}"]


def _copies(step: Step) -> float:
    """Return the CPU seconds of copying one worker's gradients once."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        for into, source in zip(step.grads[0], step.before, strict=True):
            into.copy_(source[: into.numel()])
        times.append(time.thread_time() - began)
    return min(times)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    add("--workers", nargs="+", type=int, default=[2, 4], metavar="W")
    add("--repeats", type=int, default=15, help="(default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        module = MODELS[name]().to("meta")
        numels = [p.numel() for p in module.parameters()]
        size = [name, f"{sum(numels) / 1e6:.2f} M", str(len(numels))]
        for workers in options.workers:
            for method in options.methods:
                figures = measure(module, METHODS[method], workers, options.repeats)
                rows.append([*size, str(workers), method, *figures])
                sys.stderr.write(f"{' '.join(rows[-1])}\n")
    head = ("model", "parameters", "tensors", "W", "method", "copies", "encode", "decode", "ms")
    versions = f"{dated_page.versions('torch', 'numpy')}, {os.cpu_count()} CPUs"
    table = markdown(head, rows, left=("model", "method"))
    text = f"""{dated_page.title("CPU time of a step's compression")}

`python benchmarks/engine_step.py` with {versions}: one worker's engine, one thread, medians of
{options.repeats}. `copies`: the whole engine, in multiples of one `copy_` of all buckets; `encode`
and `decode`: of these, inside codecs (low-rank methods have none); `ms`: the whole.

{table}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "engine_step", text)


if __name__ == "__main__":
    main()
