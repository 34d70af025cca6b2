"""What compression costs a GPU: seconds and memory of a whole step of GPT-2, beside torch's hooks.

One worker trains GPT-2 (124 M parameters) over NCCL, in bfloat16 by autocast, with AdamW. With one
worker nothing travels, but everything is compressed, sent to itself and decoded: what a step takes
longer than without synchronisation is what a network must save. More workers add the decoding of
what they send where a method gathers payloads. Methods take turns; the medians of steps are shown.
One more turn of each method runs under torch's profiler, which tells what the GPU is busy with.
"""

from __future__ import annotations

import argparse
import gc as garbage
import statistics
import sys
from pathlib import Path
from typing import Any

import dated_page
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_gc as gc
from lightning_gc.bench.baselines import BASELINES, NONE, PLAIN, baseline_strategy
from lightning_gc.bench.method_run import WARMUP_STEPS, StepTimer
from lightning_gc.compressors import Compressor
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy
from lightning_gc.methods.text_table import markdown

METHODS: dict[str, Compressor] = {
    "Identity()": gc.Identity(),
    "Cast()": gc.Cast(),
    "TopK(0.01)": gc.TopK(0.01),
    "TopK(0.01, selection='sampled')": gc.TopK(0.01, selection="sampled"),
    "RandomK(0.01)": gc.RandomK(0.01),
    "QSGD(4)": gc.QSGD(4),
    "EFSignSGD()": gc.EFSignSGD(),
    "Quantised(ChunkedTopK(), BinMeans(2))": gc.Quantised(gc.ChunkedTopK(), gc.BinMeans(2)),
    "PowerSGD(2)": gc.PowerSGD(2),
}
WORDS, LENGTH = 50_257, 1_024


class GPT2(LightningModule):
    """Twelve pre-norm blocks of width 768, learnt positions, the embedding tied; no dropout."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)
        for weight in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def training_step(self, words: Tensor, index: int) -> Tensor:
        """Return the mean cross-entropy of each next word."""
        hidden = self.embedding(words[:, :-1]) + self.positions.weight
        hidden = self.blocks(hidden, self.mask, is_causal=True)
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def strategy(method: str) -> Any:
    """Return a new one."""
    if method in METHODS:
        return CompressedDDPStrategy(METHODS[method], process_group_backend="nccl")
    return baseline_strategy(method, "nccl")


class Busy(Callback):
    """Traces some steps after the first ones.

    Args:
        steps: that are traced.

    Attributes:
        launches: operations of the GPU in a step: kernels, copies and fills.
        milliseconds: of a step in which the GPU works, operations side by side counted once.
        each: by the name of an operation, its milliseconds in a step.
    """

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start after the first steps."""
        if trainer.global_step == WARMUP_STEPS:
            torch.cuda.synchronize()
            self.profiler.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop after the last of the traced steps, and add up."""
        if trainer.global_step != WARMUP_STEPS + self.steps:
            return
        torch.cuda.synchronize()
        self.profiler.stop()
        events = [
            event
            for event in self.profiler.events()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        spans = sorted((e.time_range.start, e.time_range.end) for e in events)
        busy, until = 0.0, 0.0
        for start, end in spans:
            busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
        self.launches, self.milliseconds = len(events) / self.steps, busy / self.steps / 1e3
        sums: dict[str, list[float]] = {}
        for event in events:
            sums.setdefault(event.name, []).append(event.time_range.elapsed_us())
        self.each = {name: sum(found) / self.steps / 1e3 for name, found in sums.items()}

    def beside(self, base: Busy, most: int = 6) -> str:
        """Name the operations that take longer than in ``base``, with their milliseconds."""
        more = {name: each - base.each.get(name, 0.0) for name, each in self.each.items()}
        longest = sorted(more.items(), key=lambda item: -item[1])[:most]
        return ", ".join(f"{_short(name)} {ms:.2f}" for name, ms in longest if ms >= 0.05)


def _short(name: str) -> str:
    """Return a kernel's name without its types and arguments."""
    for word in ("at::native::", "(anonymous namespace)::", "void "):
        name = name.replace(word, "")
    return name.split("<", 1)[0].split("(", 1)[0][:60]


def turn(
    method: str, batch: int, steps: int, busy: Busy | None = None
) -> tuple[list[float], float]:
    """Train from the same weights; return seconds of each measured step, and GiB at most."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    clock = StepTimer(lambda _: 0)
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy(method),
        precision="bf16-mixed",
        max_steps=WARMUP_STEPS + steps,
        callbacks=[clock, *([busy] if busy else [])],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    texts = torch.randint(WORDS, (batch * (WARMUP_STEPS + steps), LENGTH + 1))
    trainer.fit(GPT2(), DataLoader(texts, batch))  # type: ignore[arg-type]
    most = torch.cuda.max_memory_allocated() / 2**30
    del trainer
    garbage.collect()
    torch.cuda.empty_cache()
    return clock.seconds[WARMUP_STEPS:], most


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    names = [*BASELINES, *METHODS]
    add("--methods", nargs="+", choices=names, default=names, metavar="METHOD")
    add("--batch", type=int, default=8, help="texts of 1,024 words (default: %(default)s)")
    add("--steps", type=int, default=20, help="in each turn (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of each method (default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; on the CPU there is engine_step.py.")
    torch.set_float32_matmul_precision("high")
    seconds: dict[str, list[float]] = {name: [] for name in options.methods}
    traced = {name: Busy() for name in options.methods}
    for name, busy in traced.items():  # this compiles kernels, too
        turn(name, options.batch, busy.steps, busy)
        sys.stderr.write(f"{name}: {busy.launches:.0f} operations, {busy.milliseconds:.1f} ms\n")
    most: dict[str, float] = {}
    for number in range(options.rounds):
        for name in options.methods:
            found, most[name] = turn(name, options.batch, options.steps)
            seconds[name] += found
            middle = 1e3 * statistics.median(found)
            sys.stderr.write(f"{number + 1}/{options.rounds} {name}: {middle:.1f} ms\n")
    middles = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    base, dense, idle = middles.get(NONE), most.get(PLAIN), traced.get(NONE)
    rows, longest = list[list[str]](), list[list[str]]()
    for name, middle in middles.items():
        more = f"{middle - base:+.1f}" if base is not None else ""
        apart = f"{most[name] - dense:+.2f}" if dense is not None else ""
        busy = traced[name]
        work = [f"{busy.launches:.0f}", f"{busy.milliseconds:.1f}"]
        rows.append([name, f"{middle:.1f}", more, *work, f"{most[name]:.2f}", apart])
        if idle is not None:
            longest.append([name, busy.beside(idle)])
    head = ["method", "ms a step", f"beside {NONE}", "operations", "ms busy"]
    head += ["GiB", f"beside {PLAIN}"]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    known = dated_page.versions("torch", "triton", "pytorch-lightning")
    versions = f"{known}, NCCL {nccl}"
    text = f"""{dated_page.title("What compression costs a GPU")}

`python benchmarks/gpu_step.py --batch {options.batch}` on one {torch.cuda.get_device_name()} with
{versions}: GPT-2, {options.batch} texts of 1,024 words a step, bfloat16 by autocast, AdamW; medians
of {options.rounds} turns of {options.steps} steps. One worker: everything is compressed and
decoded, nothing travels. torch's profiler counted operations of the GPU in a step, and the
milliseconds in which at least one runs. It ran apart from the measured steps.

{markdown(head, rows, left=("method",))}
Operations that take longer than in {NONE!r}, in milliseconds of a step:

{markdown(("method", "operations"), longest, left=("method", "operations"))}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "gpu_step", text)


if __name__ == "__main__":
    main()
