"""What compression costs a GPU: seconds and memory of a whole step of GPT-2, beside torch's hooks.

One worker trains GPT-2 (124 M parameters) over NCCL, in bfloat16 by autocast, with AdamW. With one
worker nothing travels, but everything is compressed, sent to itself and decoded: what a step takes
longer than without synchronisation is what a network must save. More workers add the decoding of
what they send where a method gathers payloads. Methods take turns; the medians of steps are shown.
"""

from __future__ import annotations

import argparse
import gc as garbage
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dated_page
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_gc as gc
from lightning_gc.bench.baselines import BASELINES, NONE, PLAIN, baseline_strategy
from lightning_gc.bench.method_run import WARMUP_STEPS, StepTimer
from lightning_gc.compressors import Compressor
from lightning_gc.core.text_table import markdown
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy

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


def turn(method: str, batch: int, steps: int) -> tuple[list[float], float]:
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
        callbacks=[clock],
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
    most: dict[str, float] = {}
    for number in range(options.rounds):
        for name in options.methods:
            found, most[name] = turn(name, options.batch, options.steps)
            seconds[name] += found
            middle = 1e3 * statistics.median(found)
            sys.stderr.write(f"{number + 1}/{options.rounds} {name}: {middle:.1f} ms\n")
    middles = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    base, dense = middles.get(NONE), most.get(PLAIN)
    rows = []
    for name, middle in middles.items():
        more = f"{middle - base:+.1f}" if base is not None else ""
        apart = f"{most[name] - dense:+.2f}" if dense is not None else ""
        rows.append([name, f"{middle:.1f}", more, f"{most[name]:.2f}", apart])
    head = ("method", "ms a step", f"beside {NONE}", "GiB", f"beside {PLAIN}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = f"torch {version('torch')}, NCCL {nccl}, Lightning {version('pytorch-lightning')}"
    text = f"""{dated_page.title("What compression costs a GPU")}

`python benchmarks/gpu_step.py --batch {options.batch}` on one {torch.cuda.get_device_name()} with
{versions}: GPT-2, {options.batch} texts of 1,024 words a step, bfloat16 by autocast, AdamW; medians
of {options.rounds} turns of {options.steps} steps. One worker: everything is compressed and
decoded, nothing travels.

{markdown(head, rows, left=("method",))}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "gpu_step", text)


if __name__ == "__main__":
    main()
