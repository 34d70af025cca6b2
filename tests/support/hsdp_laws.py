"""Shards exchanged by real ranks, step by step, and by simulated replicas; no Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_gc.engine import Engine
from lightning_gc.exchange import Compression, Synchronizer
from lightning_gc.sharded.fsdp_units import units_of
from lightning_gc.sharded.shard_exchange import ShardBuckets
from lightning_gc.sharded.sharded_workers import ShardedWorkers
from lightning_gc.transports import Simulated

MINUTE = timedelta(minutes=1)


@dataclass
class Exchanged:
    """What one rank has exchanged in one step, and what it has been left with.

    Attributes:
        shapes: per bucket, parameter name -> shape of this rank's shard.
        grads: per bucket, the mean gradient of the node, flat.
        means: per bucket, the mean over replicas.
        errors: parameter name -> error after the step.
        sent: bytes, over the steps so far.
    """

    shapes: list[dict[str, tuple[int, ...]]]
    grads: list[Tensor]
    means: list[Tensor]
    errors: dict[str, Tensor]
    sent: int


class Net(nn.Module):
    """Uneven, empty and frozen parameters; a layer that every second step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 45)
        self.second = nn.Linear(45, 60)
        self.frozen = nn.Linear(60, 60)
        self.aside = nn.Linear(60, 7)
        self.last = nn.Linear(60, 7)
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen.requires_grad_(False)
        self.second.bias.requires_grad_(False)

    def forward(self, rows: Tensor, aside: bool) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(rows))))
        hidden = hidden + self.frozen(hidden)
        head = self.aside if aside else self.last
        output: Tensor = head(hidden) * self.gain
        return output

    def backward(self, step: int, rank: int) -> None:
        """Compute the gradients of a rank's rows in a step."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        rows = torch.randn(5, 6, generator=generator)
        self.zero_grad()
        self(rows, aside=step % 2 == 1).square().mean().backward()


class Ranks:
    """One rank of R · S; a process may exchange with several compressors in turn."""

    def __init__(self, rank: int, ranks: int, shards: int) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=MINUTE)
        self.rank = rank
        shape = (ranks // shards, shards)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def exchange(
        self,
        compressor: Any,
        memory: Any = None,
        scheme: Any = None,
        steps: int = 3,
        cap: float = 7e3,
    ) -> list[Exchanged]:
        """Make backward passes of a small net; return what was exchanged in each."""
        net = Net()
        node = self.mesh["shard"]
        for child in (*net.children(), net):
            fully_shard(child, mesh=node)
        given = Compression(compressor, memory, scheme, seed=3)
        workers = ShardedWorkers(given.configured("a test"))
        workers.shard, workers.shards = node.get_local_rank(), node.size()
        workers.name(net)
        between = self.mesh.get_group("replicate")
        groups = self.mesh.mesh.t().tolist()
        synchronizer = Synchronizer(workers, torch.device("cpu"), between, MINUTE, groups=groups)
        before = workers.accounts[0].sent_bytes  # to agree on settings
        step: list[tuple[dict[str, tuple[int, ...]], Tensor, Tensor]] = []

        def submit(flat: Tensor, shapes: Any) -> Any:
            step.append((dict(shapes), flat.clone(), flat))
            return synchronizer.submit(flat, shapes)

        ShardBuckets(
            units_of(net), workers.names, cap, submit, synchronizer.check, synchronizer.end_round
        )
        found = []
        for index in range(steps):
            step.clear()
            net.backward(index, self.rank)
            self._check_gradients(workers, step)
            shapes, grads, means = (list(part) for part in zip(*step, strict=True))
            errors = {n: t.clone() for n, t in workers.first.errors().items()}
            sent = workers.accounts[0].sent_bytes - before
            found.append(Exchanged(shapes, grads, [m.clone() for m in means], errors, sent))
        synchronizer.close()
        return found

    @staticmethod
    def _check_gradients(workers: ShardedWorkers, step: Sequence[Any]) -> None:
        """What was exchanged is what the optimizer gets."""
        means: dict[str, Tensor] = {}
        for shapes, _, mean in step:
            parts = mean.split([torch.Size(shape).numel() for shape in shapes.values()])
            means |= {n: p.view(shapes[n]) for n, p in zip(shapes, parts, strict=True)}
        for param, name in workers.names.items():
            grad = param.grad.to_local()  # type: ignore[union-attr]
            assert tuple(grad.shape) == workers.shapes[name]
            if grad.numel():
                torch.testing.assert_close(grad, means[name], rtol=0, atol=0)


def simulated(
    replicas: Sequence[Sequence[Exchanged]], shard: int, shards: int, *settings: Any
) -> tuple[list[list[list[Tensor]]], list[Mapping[str, Tensor]], list[int]]:
    """Exchange the same shards between simulated replicas.

    Returns:
        Means by replica, step and bucket; errors at last, by replica; bytes, by replica.
    """
    engines = engines_of(len(replicas), shard, shards, *settings)
    transport = Simulated(len(replicas))
    means: list[list[list[Tensor]]] = [[] for _ in replicas]
    for index, first in enumerate(replicas[0]):
        flats = [[grad.clone() for grad in steps[index].grads] for steps in replicas]
        with torch.no_grad():
            for bucket, shapes in enumerate(first.shapes):
                flows = [e.flow(f[bucket], shapes) for e, f in zip(engines, flats, strict=True)]
                transport.run(flows)
        for engine in engines:
            engine.advance()
        for kept, flat in zip(means, flats, strict=True):
            kept.append(flat)
    return means, [engine.errors() for engine in engines], transport.sent_bytes


def engines_of(
    replicas: int, shard: int, shards: int, compressor: Any, memory: Any, scheme: Any
) -> list[Engine]:
    workers = ShardedWorkers(Compression(compressor, memory, scheme, seed=3).configured("a test"))
    workers.shard, workers.shards = shard, shards
    return [workers.make_engine(replica, replicas) for replica in range(replicas)]
