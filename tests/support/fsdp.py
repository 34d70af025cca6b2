"""Reduce-scatters of FSDP2, compressed by real ranks step by step, and by simulated workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_gc.engine import Engine
from lightning_gc.exchange import Compression, Configuration
from lightning_gc.lightning.for_pytorch_lightning import CompressedFSDPStrategy
from lightning_gc.sharded.fsdp_units import UnitNumbers, units_of
from lightning_gc.sharded.sharded_workers import FSDPWorkers, replica_mesh
from lightning_gc.sharded.unit_scatters import ReduceScatter, UnitScatters
from lightning_gc.transports import Recording, Simulated
from lightning_gc.transports.distributed import Distributed
from tests.support.accelerator import BACKEND
from tests.support.hsdp_laws import MINUTE, Net

Shapes = dict[str, tuple[int, ...]]
SEED = 3


def fsdp(compressor: Any = None, **options: Any) -> CompressedFSDPStrategy:
    """Return the strategy of a rank that runs in a process of its own."""
    return CompressedFSDPStrategy(compressor, process_group_backend=BACKEND, **options)


def plain(ranks: int, **options: Any) -> ModelParallelStrategy:
    """Return Lightning's own: FSDP2 with dense reduce-scatters."""
    return ModelParallelStrategy(ranks, 1, process_group_backend=BACKEND, **options)


@dataclass
class Scattered:
    """What one rank has exchanged in one step.

    Attributes:
        shapes: per exchange, parameter name -> padded shape.
        grads: per exchange, this rank's gradient of whole parameters, flat.
        means: per exchange, this rank's shards of their mean, as FSDP2 gets them.
        sent: bytes, over the steps so far.
        padding: of each parameter, elements at the end of its gradient that it does not have.
        errors: after the step, by name, flat and padded.
    """

    shapes: list[Shapes]
    grads: list[Tensor]
    means: list[Tensor]
    sent: int
    padding: dict[str, int]
    errors: dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How gradients are exchanged."""

    compressor: Any
    memory: Any = "none"
    scheme: ReduceScatter = field(default_factory=ReduceScatter)

    @property
    def configuration(self) -> Configuration:
        given = Compression(self.compressor, self.memory, self.scheme, seed=SEED)
        return given.configured("a test")


class Watched(UnitScatters):
    """Keeps what goes in and what comes out."""

    seen: list[tuple[Shapes, Tensor, Tensor]]

    def _exchange(self, name: str, grad: Tensor, shapes: Shapes, group: Any) -> None:  # type: ignore[override]
        before = grad.clone()
        super()._exchange(name, grad, shapes, group)
        me, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.seen.append((dict(shapes), before, own_shards(grad, shapes, me, ranks)))


def own_shards(flat: Tensor, shapes: Mapping[str, tuple[int, ...]], me: int, ranks: int) -> Tensor:
    """Return one worker's parts of all parameters in a flat gradient."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    return torch.cat([part.view(ranks, -1)[me] for part in flat.split(sizes)])


def errors_of(engine: Engine) -> dict[str, Tensor]:
    """Return a copy of the errors, flat and padded."""
    named = engine.buffers.named
    return {n: b["error"].reshape(-1).clone() for n, b in named.items() if "error" in b}


def scatter(rank: int, ranks: int, way: Way, steps: int = 3) -> list[Scattered]:
    """Make backward passes of a small net in shards; return what was exchanged in each."""
    net, mesh = sharded(rank, ranks)
    workers = FSDPWorkers(way.configuration)
    workers.shard, workers.shards = rank, ranks
    workers.name(net)
    transport = Distributed(mesh.get_group(), per_node=way.scheme.neighbours(ranks))
    recording = Recording(transport)
    workers.start([recording], revocable=False)
    units = units_of(net)
    numbers = UnitNumbers([unit.name for unit in units], verified=False)
    watched = Watched(units, workers, transport, recording, lambda: None, numbers)
    found = []
    for index in range(steps):
        watched.seen = []
        net.backward(index, rank)
        for name, param in net.named_parameters():
            if param.grad is not None:  # what the exchange has left is what the optimizer gets
                _check_gradient(name, param.grad, watched.seen, ranks)
        shapes, grads, means = (list(part) for part in zip(*watched.seen, strict=True))
        left = dict(workers.first.padding), errors_of(workers.first)
        found.append(Scattered(shapes, grads, means, recording.sent_bytes, *left))
    watched.close()
    return found


def sharded(rank: int, ranks: int) -> tuple[Net, DeviceMesh]:
    """Return a small net in shards, and its mesh."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=MINUTE)
    mesh = replica_mesh("cpu", 1, ranks, MINUTE)["data_parallel"]
    net = Net()
    for child in (*net.children(), net):
        fully_shard(child, mesh=mesh)
    return net, mesh


def by_torch(rank: int, ranks: int, steps: int = 3) -> list[dict[str, Tensor]]:
    """Make the same passes; return the gradients of FSDP2's own reduce-scatters, by name."""
    (net, _), found = sharded(rank, ranks), []
    for index in range(steps):
        net.backward(index, rank)
        grads: dict[str, Any] = {n: p.grad for n, p in net.named_parameters()}
        found.append({n: g.to_local().reshape(-1) for n, g in grads.items() if g is not None})
    return found


def _check_gradient(name: str, grad: Any, seen: Sequence[Any], ranks: int) -> None:
    for shapes, _, means in seen:
        if name in shapes:
            sizes = [torch.Size(shape).numel() // ranks for shape in shapes.values()]
            mine = means.split(sizes)[list(shapes).index(name)]
            local = grad.to_local().reshape(-1)
            assert torch.equal(local, mine[: local.numel()]), name
            return
    raise AssertionError(f"{name} has a gradient that nobody has exchanged")


def simulated(ranks: Sequence[Sequence[Scattered]], way: Way) -> list[list[Scattered]]:
    """Return what simulated workers make of the same gradients."""
    count = len(ranks)
    engines: list[Engine] = [way.configuration.engine(worker, count) for worker in range(count)]
    for engine in engines:
        engine.padding = ranks[0][0].padding
    network = Simulated(count, way.scheme.neighbours(count))
    found: list[list[Scattered]] = [[] for _ in ranks]
    for steps in zip(*ranks, strict=True):
        means: list[list[Tensor]] = [[] for _ in ranks]
        for at, shapes in enumerate(steps[0].shapes):
            grads = [step.grads[at].clone() for step in steps]
            network.run([e.flow(g, shapes) for e, g in zip(engines, grads, strict=True)])
            for me, grad in enumerate(grads):
                means[me].append(own_shards(grad, shapes, me, count))
        for me, engine in enumerate(engines):
            engine.advance()
            step = steps[me]
            sent = network.sent_bytes[me]
            left = step.padding, errors_of(engine)
            found[me].append(Scattered(step.shapes, step.grads, means[me], sent, *left))
    return found
