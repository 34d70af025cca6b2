"""A small transformer that predicts words, and a worker that trains it with AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LENGTH = 32
WIDTH, LAYERS = 64, 2


class Transformer(nn.Module):
    """Pre-norm blocks, learnt positions, the embedding tied or a head of its own."""

    def __init__(self, words: int, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = None if tied else nn.Linear(WIDTH, words, bias=False)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross-entropy of the words that follow."""
        hidden = self.blocks(self.embedding(words) + self.positions, mask=self.mask, is_causal=True)
        head = self.embedding if self.head is None else self.head
        logits = hidden @ head.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class Worker:
    """A replica, its optimizer and its share of the text.

    Args:
        model: trained in place.
        rate: the largest learning rate; warmed up over 5 % of the steps, then falling to zero in a
            cosine.
        steps: of the run.
        text: its share, ``(rows, words)``.
        momentum: AdamW's β₁.
        make: makes another optimizer of the model and the rate. If the optimizer averages its
            weights itself, as a schedule-free one does, the rate does not fall.
    """

    def __init__(
        self,
        model: Transformer,
        rate: float,
        steps: int,
        text: Tensor,
        momentum: float = 0.9,
        make: Callable[[Transformer, float], Optimizer] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = (
            make(model, rate)
            if make
            else torch.optim.AdamW(model.parameters(), rate, betas=(momentum, 0.999))
        )
        warm, falls = max(steps // 20, 1), not hasattr(self.optimizer, "eval")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(
                (step + 1) / warm, (1 + math.cos(math.pi * step / steps)) / 2 if falls else 1
            ),
        )
        self.text = text

    def backward(self, step: int) -> None:
        """Compute gradients of a batch."""
        start = step * LENGTH % (self.text.shape[1] - LENGTH - 1)
        piece = self.text[:, start : start + LENGTH + 1]
        self.optimizer.zero_grad()
        self.model(piece[:, :-1], piece[:, 1:]).backward()

    def step(self) -> None:
        """Clip gradients and make a step."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()

    def evaluate(self, text: Tensor) -> float:
        """Return the mean cross-entropy of a text, at the averaged weights if there are some."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        return validation(self.model, text)

    def weights(self) -> dict[str, Tensor]:
        """Return parameter name -> weights."""
        return {name: param.detach() for name, param in self.model.named_parameters()}


def validation(model: Transformer, text: Tensor) -> float:
    """Return the mean cross-entropy of a text."""
    model.eval()
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    with torch.no_grad():
        losses = [float(model(part[:, :-1], part[:, 1:])) * len(part) for part in rows.split(64)]
    return sum(losses) / len(rows)
