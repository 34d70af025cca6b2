"""A training loop of a user's own, of a model in shards on all ranks, by FSDP2 and ``attach``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lightning_gc import attach
from lightning_gc.sharded.fsdp_units import in_backward
from lightning_gc.sharded.unit_gathers import UnitGather

WORDS = 101
"""Of the model: no number of ranks divides it."""


class Net(nn.Module):
    """Has a tied table, a frozen layer, odd sizes, and a gain that is empty on most ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, 32)
        self.body = nn.ModuleList([nn.Linear(32, 77), nn.Linear(77, 32)])
        self.norm = nn.LayerNorm(32)
        self.frozen = nn.Linear(32, 64)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.table(words)
        for layer in self.body:
            hidden = torch.tanh(layer(hidden))
        hidden = self.norm(hidden) + 0.1 * self.frozen(hidden)[:, :32]
        output: Tensor = self.head(hidden) * self.gain
        return output


def checkpointed(net: Net) -> None:
    """Recompute the body's layers in the backward pass."""
    net.body = nn.ModuleList([checkpoint_wrapper(layer) for layer in net.body])


def compiled(net: Net) -> None:
    """Compile the body's layers, by a backend without a compiler."""
    for layer in net.body:
        layer.compile(backend="aot_eager")


def prefetching(net: Net) -> None:
    """Gather the next layer's weights early."""
    first, second = net.body
    first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]
    second.set_modules_to_backward_prefetch([first])  # type: ignore[operator]


class Loop:
    """Trains ``Net``; without a compressor, as torch does.

    Args:
        rank: whose data these are.
        compressor: of ``attach``, which gets ``options`` too.
        before: changes the net before it is sharded.
        after: changes it afterwards.
        reshard: ``reshard_after_forward`` of the body's layers.
        policy: mixed precision.
        offload: of parameters and gradients.
    """

    def __init__(
        self,
        rank: int,
        compressor: Any = None,
        *,
        before: Callable[[Net], None] | None = None,
        after: Callable[[Net], None] | None = None,
        reshard: bool | int = True,
        policy: MixedPrecisionPolicy | None = None,
        offload: OffloadPolicy | None = None,
        **options: Any,
    ) -> None:
        net: Any = Net()
        self.net = net
        if before is not None:
            before(net)
        policies: dict[str, Any] = {"mp_policy": policy or MixedPrecisionPolicy()}
        policies["offload_policy"] = offload or OffloadPolicy()
        for layer in (*self.net.body, self.net.frozen):
            fully_shard(layer, reshard_after_forward=reshard, **policies)
        fully_shard(self.net, **policies)
        if after is not None:
            after(self.net)
        trained = [param for param in self.net.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.handle: Any = None
        if compressor is not None:
            self.handle = attach(net, compressor, optimizers=self.optimizer, **options)
        draw = torch.Generator().manual_seed(rank)
        self.data = [torch.randint(0, WORDS, (16,), generator=draw) for _ in range(50)]

    def run(self, start: int, stop: int) -> Loop:
        """Train from one step to another."""
        for words in self.data[start:stop]:
            self.optimizer.zero_grad()
            wanted = (7 * words + 1) % WORDS
            nn.functional.cross_entropy(self.net(words).float(), wanted).backward()
            self.optimizer.step()
        return self

    def end(self) -> dict[str, Any]:
        """Close; return full exact parameters, as arrays."""
        if self.handle is not None:
            self.handle.close()
        return self.weights()

    def weights(self) -> dict[str, Any]:
        """Return full exact parameters, as arrays."""
        named = self.net.named_parameters()
        return {
            name.replace("_checkpoint_wrapped_module.", ""): param.full_tensor().detach().numpy()
            for name, param in named
        }

    def computed(self) -> dict[str, Any]:
        """Return the weights with which this rank computes, as arrays."""
        units = [module for module in self.net.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.unshard()
        found = {
            n: p.detach().to(torch.float32, copy=True).numpy()
            for n, p in self.net.named_parameters()
        }
        for unit in units:
            unit.reshard()
        return found


class Watch:
    """Notes what each unit's gathers leave, while it is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[UnitGather, bool, Tensor]] = []  # unit, in a backward pass, weights

    def __enter__(self) -> Watch:
        self._own = UnitGather.__call__

        def noting(gather: UnitGather, output_tensor: Tensor, *args: Any, **given: Any) -> None:
            self._own(gather, output_tensor, *args, **given)
            self.calls.append((gather, in_backward(), output_tensor.clone()))

        UnitGather.__call__ = noting  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        UnitGather.__call__ = self._own  # type: ignore[method-assign]

    def differing(self) -> int:
        """Return how many gathers of backward passes differ from the gather before."""
        last: dict[UnitGather, Tensor] = {}
        count = 0
        for gather, backward, weights in self.calls:
            count += backward and not torch.equal(last[gather], weights)
            last[gather] = weights
        return count
