"""The models of the network benchmark, and batches for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from images import resnet
from shared import hush

hush()
# Name on the command line -> in a table.
MODELS = {
    "lstm8": "LSTM, 4.45 M parameters, batch 8",
    "lstm32": "LSTM, 4.45 M parameters, batch 32",
    "gpt": "transformer, 5.73 M parameters, batch 8",
    "resnet18": "ResNet-18, batch 16",
    "mlp": "MLP, 25 M parameters, batch 32",
}
WORDS, HIDDEN, BPTT = 10_000, 300, 35


class Network(LightningModule):
    """Trains by SGD, or by another optimizer."""

    def __init__(
        self,
        net: nn.Module,
        rate: float,
        clip: float | None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        super().__init__()
        self.net, self.rate, self.clip, self.optimizer = net, rate, clip, optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy."""
        outputs = self.net(batch[0])
        return nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return it with its defaults, at the learning rate."""
        return self.optimizer(self.parameters(), lr=self.rate)


class Words(nn.Module):
    """The thesis's medium language model: two LSTM layers, the embedding tied, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        nn.init.uniform_(self.embedding.weight, -(HIDDEN**-0.5), HIDDEN**-0.5)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, ``(columns, steps, words)``."""
        hidden, _ = self.lstm(self.embedding(words))
        logits: Tensor = hidden @ self.embedding.weight.t()
        return logits


class Transformer(nn.Module):
    """A small GPT: pre-norm blocks, learnt positions, the embedding tied."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(BPTT, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for weight in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BPTT))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, ``(columns, steps, words)``."""
        hidden = self.embedding(words) + self.positions.weight
        hidden = self.blocks(hidden, self.mask, is_causal=True)
        logits: Tensor = hidden @ self.embedding.weight.t()
        return logits


class Chain(Dataset[tuple[Tensor, Tensor]]):
    """Text of a Markov chain: three words may follow each, and few words are frequent.

    So there is something to learn: at first, as in any text, which words are.
    """

    def __init__(self, length: int, seed: int) -> None:
        chance = torch.rand(WORDS, 3, generator=torch.Generator().manual_seed(0))
        follow = (WORDS * chance**4).long()
        draw = torch.Generator().manual_seed(seed)
        words = (WORDS * torch.rand(length, generator=draw) ** 4).long()
        steps = [words]
        for _ in range(BPTT):
            choice = torch.randint(3, (length,), generator=draw)
            steps.append(follow[steps[-1], choice])
        self.words = torch.stack(steps, dim=1)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index, :-1], self.words[index, 1:]


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Noise, with the class of a fixed random projection."""

    def __init__(self, length: int, shape: tuple[int, ...], classes: int, seed: int) -> None:
        self.inputs = torch.randn(length, *shape, generator=torch.Generator().manual_seed(seed))
        flat = self.inputs.flatten(1)
        project = torch.randn(flat.shape[1], classes, generator=torch.Generator().manual_seed(0))
        self.classes = (flat @ project).argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.classes[index]


def build(name: str, steps: int, seed: int) -> tuple[Network, DataLoader[Any]]:
    """Return a new model and batches for so many steps, drawn by a seed."""
    if name == "gpt":
        module = Network(Transformer(), 1e-3, 1.0, torch.optim.AdamW)
        return module, DataLoader(Chain(8 * steps, seed), 8)
    if name.startswith("lstm"):
        batch = int(name[4:])
        module = Network(Words(), rate=30.0, clip=0.25)
        return module, DataLoader(Chain(batch * steps, seed), batch)
    if name == "resnet18":
        net = resnet(3, 10, width=64, stages=4, blocks=2)
        return Network(net, 0.05, None), DataLoader(Pairs(16 * steps, (3, 32, 32), 10, seed), 16)
    width = 2236
    layers = [m for _ in range(5) for m in (nn.Linear(width, width), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(width, 10))
    return Network(net, 0.05, None), DataLoader(Pairs(32 * steps, (width,), 10, seed), 32)
