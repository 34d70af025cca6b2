"""Losses of a transformer whose FSDP sends few bits: weights, gradients and both, over three seeds.

    torchrun --nproc-per-node 2 benchmarks/fsdp_losses.py --data ptb/     # again: goes on
    python benchmarks/fsdp_losses.py --table

A GPT of characters is trained by AdamW on the Penn Treebank's text, in plain torch, by FSDP2 and
``attach``. Validation computes with the gathered weights, as training does. Each finished run is a
line of a file, so an interrupted benchmark goes on where it was. ``--table`` writes what there is
into a dated page. "Within the spread": the mean over seeds is not above the worst dense seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_gc import QSGD, Identity, Int8, NarrowResidual, WeightDifferences, attach
from lightning_gc.methods.text_table import markdown

RUNS = Path("runs") / "fsdp_losses.jsonl"
WIDTH, LAYERS, LENGTH, BATCH, RATE = 128, 4, 64, 16, 2e-3
EIGHT = Int8(block_size=256)
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FSDP2": (None, {}),
    "8-bit weights": (Identity(), {"weights": EIGHT}),
    "4-bit gradients": (QSGD(4), {}),
    "8-bit weights, 4-bit gradients": (QSGD(4), {"weights": EIGHT}),
    "the same, errors in 8 bits": (
        QSGD(4),
        {"weights": EIGHT, "memory": NarrowResidual("int8")},
    ),
    "4-bit differences, 4-bit gradients": (QSGD(4), {"weights": WeightDifferences()}),
}


class Letters(nn.Module):
    """A small GPT of characters: pre-norm blocks, learnt positions."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits, ``(batch, LENGTH, letters)``."""
        hidden = self.embedding(letters) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def texts(folder: Path) -> tuple[Tensor, Tensor, int]:
    """Return training and validation text as numbers, and how many letters there are."""
    parts = [(folder / f"ptb.{name}.txt").read_text() for name in ("train", "valid")]
    known = {letter: i for i, letter in enumerate(sorted(set("".join(parts))))}
    train, valid = (torch.tensor([known[c] for c in part]) for part in parts)
    return train, valid, len(known)


def batch_at(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return letters and the following ones."""
    places = starts.view(-1, 1) + torch.arange(LENGTH)
    return text[places], text[places + 1]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy, in nats."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def trained(way: str, seed: int, steps: int, data: tuple[Tensor, Tensor, int]) -> dict[str, Any]:
    """Train one model; return its losses, bytes and seconds."""
    train, valid, letters = data
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model: Any = Letters(letters)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 50) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    compressor, options = WAYS[way]
    handle = None
    if compressor is not None:
        handle = attach(model, compressor, optimizers=optimizer, seed=seed, **options)
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    began, losses = time.perf_counter(), []
    for _ in range(steps):
        starts = torch.randint(0, len(train) - LENGTH - 1, (BATCH,), generator=draw)
        optimizer.zero_grad()
        loss = loss_of(model, batch_at(train, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    seconds = (time.perf_counter() - began) / steps
    account = None if handle is None else handle.account()
    with torch.no_grad():
        starts = torch.arange(rank, 512, ranks) * (len(valid) // 513)
        parts = [float(loss_of(model, batch_at(valid, part))) for part in starts.split(32)]
    both = torch.tensor([statistics.mean(losses[-50:]), statistics.mean(parts)])
    dist.all_reduce(both)
    if handle is not None:
        handle.close()
    train_loss, valid_loss = (both / ranks).tolist()
    found = {"way": way, "seed": seed, "steps": steps, "ranks": ranks, "seconds": seconds}
    found |= {"train": train_loss, "valid": valid_loss}
    if account is not None:
        found["bytes"] = account.wire_bytes / steps
        found["weight_bytes"] = (account.weight_bytes or 0) / steps
    return found


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the finished runs."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def work(options: argparse.Namespace) -> None:
    """Train all that is not done yet, in one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = texts(options.data)
    for seed in range(options.seeds):
        for way in WAYS:
            done = [(r["way"], r["seed"], r["steps"]) for r in lines(options.runs)]
            skip = torch.tensor([(way, seed, options.steps) in done])
            dist.broadcast(skip, src=0)
            if skip:
                continue
            found = trained(way, seed, options.steps, data)
            if dist.get_rank() == 0:
                options.runs.parent.mkdir(parents=True, exist_ok=True)
                with options.runs.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                dated_page.say(json.dumps(found))
            dist.barrier()
    dist.destroy_process_group()


def table(options: argparse.Namespace) -> None:
    """Write what there is into a dated page."""
    runs = [run for run in lines(options.runs) if run["steps"] == options.steps]
    dense = [run["valid"] for run in runs if run["way"] == "FSDP2"]
    rows = []
    for way in WAYS:
        own = [run for run in runs if run["way"] == way]
        if not own:
            continue
        losses = [run["valid"] for run in own]
        mean = statistics.mean(losses)
        rows.append(
            [
                way,
                str(len(own)),
                f"{mean:.4f}",
                f"{min(losses):.4f} to {max(losses):.4f}",
                "yes" if mean <= max(dense) else "no",
                f"{own[0]['bytes']:,.0f}" if "bytes" in own[0] else "",
            ]
        )
    versions = dated_page.versions("lightning-gc", "torch")
    head = ["", "seeds", "validation loss", "seeds from to", "within the spread", "bytes a step"]
    text = f"""{dated_page.title("Losses of FSDP with few bits")}

`torchrun --nproc-per-node {runs[0]["ranks"]} benchmarks/fsdp_losses.py --steps {options.steps}`,
then `--table`, with Python {sys.version.split()[0]}, {versions},
{os.cpu_count()} CPUs. A GPT of {LAYERS} layers and width {WIDTH} on the Penn Treebank's characters,
AdamW, {LENGTH} x {BATCH} characters a rank and step. Bytes: those that this library has sent.

{markdown(head, rows)}
"""
    dated_page.write(options.out, "fsdp_losses", text, runs)
    dated_page.say(text)


def main() -> None:
    """Train, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder with ptb.train.txt and ptb.valid.txt")
    add("--steps", type=int, default=600)
    add("--seeds", type=int, default=3)
    add("--runs", type=Path, default=RUNS, help="file with a line for each finished run")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--table", action="store_true", help="write the page, train nothing")
    options = parser.parse_args()
    if options.table:
        table(options)
    elif options.data is None:
        parser.error("give --data, the folder of the text")
    else:
        work(options)


if __name__ == "__main__":
    main()
