"""Fits of models whose layers T ranks have together, over Gloo, in real processes."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.hsdp import fit_sharded

COPIED = ("inside.weight", "inside.bias", "norm.weight", "norm.bias", "down.bias", "gain")
"""Ends of the names of parameters that all ranks of a tensor-parallel group have."""


class Block(nn.Module):
    """A norm whose input is cut along the sequence, and two layers cut by columns and rows."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return added


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


class Net(nn.Module):
    """A layer that is not cut, two blocks, a head, and a scale; rows are a sequence."""

    def __init__(self, inner: int = 36) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(8, 24)
        self.blocks = nn.ModuleList([Block(24, inner), Block(24, inner)])
        self.head = nn.Linear(24, 12)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.inside(batch.repeat(2, 1)[None])
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.head(hidden) * self.gain
        return output[0]

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - torch.cat((batch, batch[:, :4]), 1).repeat(2, 1)).square().mean()

    def cut(self, tensors: Any) -> None:
        """Cut the layers over a mesh of tensor-parallel ranks."""
        first, second = self.blocks
        first_input = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
        )
        parallelize_module(first, tensors, first_input)
        for block in (first, second):
            parallelize_module(block, tensors, PLAN)
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(self.head, tensors, head)

    def shard(self, mesh: Any) -> None:
        """Put all layers in shards."""
        for part in (self.inside, *self.blocks, self.head, self):
            fully_shard(part, mesh=mesh)


class Parallel(pl.LightningModule):
    """The net, as Lightning's documentation parallelises one."""

    def __init__(self, adam: bool = False) -> None:
        super().__init__()
        self.net, self.adam = Net(), adam
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self.net, "set_requires_gradient_sync"):
            return
        mesh: Any = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            self.net.cut(mesh["tensor_parallel"])
        self.net.shard(mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit_parallel(
    rank: int, strategy: Any, steps: int, size: int = 2, ranks: int = 4, **settings: Any
) -> dict[str, Any]:
    """Train as one of the ranks; the ``size`` of a tensor-parallel group have the same batches."""
    settings = {"module": Parallel} | settings
    return fit_sharded(rank // size, strategy, steps, ranks=ranks, **settings)
