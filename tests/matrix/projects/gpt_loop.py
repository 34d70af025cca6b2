"""A GPT's loop in plain torch: ``attach``, accumulation, clipping, a warm-up, its own files."""

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparison import compare, seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import attach
from lightning_gc.compressors import Compressor

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 65, 32, 64, 4, 2
STEPS, MICRO_BATCHES, RATE = 12, 2, 1e-3


class Block(nn.Module):
    """Attention to the past, and a perceptron, each after a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, width)`` to the same."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.mixed(self.before(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(self.after(x))
        return out


class Model(nn.Module):
    """Tokens and positions, blocks, and a head that shares the weights of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the next token."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        guesses = self.head(self.norm(self.blocks(nn.functional.dropout(x, 0.1))))
        return nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())


def rate(step: int) -> float:
    """Return the learning rate: a warm-up, and half a cosine."""
    if step < 3:
        return RATE * (step + 1) / 3
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 3))))


def batch() -> Tensor:
    """Return sequences that count in threes."""
    return (torch.randint(VOCABULARY, (8, 1)) + 3 * torch.arange(LENGTH)) % VOCABULARY


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for half of the steps, or for all; each worker keeps a file of its own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    seed(0)
    model = Model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    ddp, scaler = DistributedDataParallel(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    handle = None
    if compressor is not None:
        handle = attach(ddp, compressor, optimizers=optimizer, scaler=scaler)
    kept: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
    kept |= {"compression": handle} if handle else {}
    file = folder / f"worker{os.environ['RANK']}.pt"
    begin = 0
    if resume:
        saved = torch.load(file, weights_only=True)
        begin = saved["step"]
        for name, each in kept.items():
            each.load_state_dict(saved[name])
    for step in range(begin, STEPS // 2 if stop else STEPS):
        seed(1 + step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for micro in range(MICRO_BATCHES):
            ddp.require_backward_grad_sync = micro == MICRO_BATCHES - 1
            scaler.scale(ddp(batch()) / MICRO_BATCHES).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    if stop:
        folder.mkdir(parents=True, exist_ok=True)
        states = {name: each.state_dict() for name, each in kept.items()}
        torch.save(states | {"step": STEPS // 2}, file)
    if handle is not None:
        handle.close()
    return model


if __name__ == "__main__":
    compare(fit)
