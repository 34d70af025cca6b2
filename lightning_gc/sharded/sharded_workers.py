"""ShardedWorkers: the engine of a worker whose parameters are shared out among a node's ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_gc.compressors.wrappers.size_switch import for_shards
from lightning_gc.engine import Engine
from lightning_gc.engine.error_buffers import Made
from lightning_gc.exchange.workers import Configuration, HasWeights, Workers
from lightning_gc.transports.distributed import own_group


class ShardedWorkers(Workers):
    """One rank's part of a worker (a replica): its engine compresses this rank's shards.

    A parameter of shape ``(n, ...)`` over S shards is compressed in S pieces of ``(⌈n/S⌉, ...)``,
    the last ones shorter or empty. Limits of size, as ``SizeSwitch(min_numel=...)``, are meant for
    whole parameters, so they are divided by S here. Each shard has its own random numbers. Shared
    ones are equal on all replicas.

    Args:
        configuration: of the engines, as the user has given it.

    Attributes:
        shard: this rank's index among the ranks of its replica.
        shards: S.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.shard, self.shards = 0, 1

    def name(self, module: nn.Module) -> None:
        """Set ``names`` to the trained parameters of ``module`` that have elements."""
        super().name(module)
        self.names = {param: name for param, name in self.names.items() if param.numel()}

    def make_engine(self, worker: int, workers: int) -> Engine:
        """Return an engine without state for this rank's shards."""
        whole = self.configuration
        compressor = for_shards(whole.compressor, self.shards)
        seed = seed_of_shard(whole.seed, self.shard)
        part = dataclasses.replace(whole, compressor=compressor, seed=seed)
        return part.engine(worker, workers)

    def place(self) -> dict[str, int]:
        """Return which shard this rank has."""
        return {"shard": self.shard, "shards": self.shards}

    def regroup(self, layout: Sequence[Sequence[str]]) -> None:
        """Do nothing: buckets of shards have one layout from the first round on."""

    def _largest(self, param: Tensor) -> tuple[int, ...]:
        """Return the first shard's shape, the same on all ranks."""
        return shard_shape(tuple(param.shape), dim_of(param), self.shards)


def dim_of(param: Tensor) -> int:
    """Return the dimension along which a parameter is sharded."""
    sharded: Any = param
    return int(sharded.placements[-1].dim)


def shard_shape(shape: tuple[int, ...], dim: int, shards: int) -> tuple[int, ...]:
    """Return the shape of the largest of ``shards`` pieces of a tensor cut along ``dim``."""
    return (*shape[:dim], math.ceil(shape[dim] / shards), *shape[dim + 1 :])


def seed_of_shard(seed: int, shard: int) -> int:
    """Return the seed of a shard: the run's for the first, others for the others."""
    if shard == 0:
        return seed
    digest = hashlib.blake2b(repr((seed, shard)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FSDPWorkers(ShardedWorkers):
    """One rank of FSDP2 is one worker: it compresses its gradient of whole parameters.

    A parameter of shape ``(n, ...)`` counts as ``(W·⌈n/W⌉, ...)``, as FSDP2 pads it. So limits of
    size apply to full parameters, and all ranks decide equally. Private random numbers of ranks
    differ by the worker's index.

    Attributes:
        gathers: of compressed weights; None: FSDP2's own.
    """

    gathers: HasWeights | None = None

    def make_engine(self, worker: int, workers: int) -> Engine:
        """Return an engine without state for this rank."""
        parts, cuts = self.configuration, {n: self._cut(param) for param, n in self.names.items()}
        return _PaddedEngine(parts, worker, workers, cuts)

    def _cut(self, param: Tensor) -> Cut:
        return Cut(tuple(param.shape), dim_of(param), self.shards)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> its full shape: a rank keeps errors of full parameters."""
        return {name: tuple(param.shape) for param, name in self.names.items()}

    def place(self) -> dict[str, int]:
        """Return nothing: each rank is a worker."""
        return {}

    def _largest(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape by which a parameter counts as compressed."""
        return self._cut(param).stacked


class Cut(NamedTuple):
    """How a parameter is cut into equal shards, the last ones padded with zeros.

    Attributes:
        shape: of the parameter.
        dim: along which it is cut.
        shards: W.
    """

    shape: tuple[int, ...]
    dim: int
    shards: int

    @property
    def stacked(self) -> tuple[int, ...]:
        """The shape of all shards, one below the other."""
        return stacked(shard_shape(self.shape, self.dim, self.shards), self.shards)

    @property
    def padding(self) -> int:
        """Elements of ``stacked`` that belong to no parameter."""
        return math.prod(self.stacked) - math.prod(self.shape)

    def stack(self, whole: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape in the shape ``stacked``."""
        size = shard_shape(self.shape, self.dim, self.shards)[self.dim] * self.shards
        full = whole.new_zeros((*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]))
        full.narrow(self.dim, 0, self.shape[self.dim]).copy_(whole)
        return full if self.dim == 0 else torch.cat(full.chunk(self.shards, self.dim))

    def unstack(self, tensor: Tensor) -> Tensor:
        """Undo ``stack``."""
        full = tensor if self.dim == 0 else torch.cat(tensor.chunk(self.shards), self.dim)
        return full.narrow(self.dim, 0, self.shape[self.dim])


class _PaddedEngine(Engine):
    """Compresses parameters in padded shapes; their state has the parameters' own outside."""

    def __init__(
        self, parts: Configuration, worker: int, workers: int, cuts: Mapping[str, Cut]
    ) -> None:
        given = parts.compressor, parts.memory, parts.scheme
        super().__init__(*given, worker=worker, workers=workers, seed=parts.seed)
        self._cuts = cuts
        self.padding = {name: cut.padding for name, cut in cuts.items() if cut.padding}

    @property
    def kept(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {
            name: Made(buffers, self._cuts[name].unstack)
            for name, buffers in self.buffers.named.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        memory = {
            name: {buffer: self._cuts[name].stack(tensor) for buffer, tensor in kept.items()}
            for name, kept in state["memory"].items()
        }
        super().load_state_dict({**state, "memory": memory})


def stacked(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the shape of ``shards`` pieces of one shape, one below the other."""
    return (shards * shape[0], *shape[1:])


NAMES = ("replicate", "data_parallel", "tensor_parallel")


def replica_mesh(
    device_type: str, replicas: int, shards: int, timeout: timedelta | None
) -> DeviceMesh:
    """Return a mesh ``(R, S, 1)`` over all ranks; those of a replica follow each other.

    ``init_device_mesh`` gives its groups torch's default timeout, 10 to 30 minutes, for which the
    other ranks of a node would wait for one that hangs.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        replicas: R.
        shards: S.
        timeout: of all collectives in the mesh's groups; None: torch's default.

    Communication pattern:
        All ranks make all groups, in the same order.
    """
    mesh = torch.arange(replicas * shards, device="cpu").view(replicas, shards, 1)
    of_each = (mesh.flatten(1).t(), mesh.flatten(1), mesh.view(-1, 1))
    groups = [own_group(rows.tolist(), timeout) for rows in of_each]
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=NAMES)
