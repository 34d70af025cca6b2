"""ShardedWorkers: the engine of a worker with its parameters shared out among a node's ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_gc.checkpoint.shard_store import ShardPart
from lightning_gc.compressors.wrappers.size_switch import for_shards
from lightning_gc.engine import Engine
from lightning_gc.engine.error_buffers import Made
from lightning_gc.exchange.compression import Configuration
from lightning_gc.exchange.workers import HasWeights, Workers
from lightning_gc.sharded.fsdp_units import units_of
from lightning_gc.transports.distributed import own_group


class Block(NamedTuple):
    """A rank's part of a parameter by tensor parallelism, which FSDP2 cuts into shards.

    Attributes:
        part: its place in the parameter, which is all of it where tensors are not parallel.
        dim: along which FSDP2 cuts it.
        copies: ranks of the tensor-parallel group that have the same block.
    """

    part: ShardPart
    dim: int
    copies: int

    def shard(self, index: int, shards: int) -> ShardPart:
        """Return one of S shards as a place in the parameter; the last ones may be empty."""
        shape, offsets, sizes = self.part
        length = shard_shape(sizes, self.dim, shards)[self.dim]
        begin = min(index * length, sizes[self.dim])
        stop = min(begin + length, sizes[self.dim])
        return ShardPart(
            shape,
            tuple(o + begin if d == self.dim else o for d, o in enumerate(offsets)),
            tuple(stop - begin if d == self.dim else n for d, n in enumerate(sizes)),
        )


def block_of(param: Any, dims: int, tensor_ranks: int) -> Block:
    """Return the block of a parameter in shards.

    Args:
        param: a DTensor.
        dims: of its mesh that are FSDP2's; those behind them are tensor parallel.
        tensor_ranks: T, of a tensor-parallel group; they have copies of a block that is not cut.
    """
    mesh, shape = param.device_mesh, tuple(param.shape)
    offsets, sizes, copies = [0] * len(shape), list(shape), tensor_ranks
    for number, placement in enumerate(param.placements[dims:], dims):
        if placement.is_shard():
            length = math.ceil(sizes[placement.dim] / mesh.size(number))
            offsets[placement.dim] += mesh.get_local_rank(number) * length
            sizes[placement.dim] = length
            copies //= mesh.size(number)
    part = ShardPart(shape, tuple(offsets), tuple(sizes))
    return Block(part, int(param.placements[dims - 1].dim), copies)


class ShardedWorkers(Workers):
    """One rank's part of a worker (a replica): its engine compresses this rank's shards.

    A parameter of shape ``(n, ...)`` over S shards is compressed in S pieces of ``(⌈n/S⌉, ...)``,
    the last ones shorter or empty. Limits of size, as ``SizeSwitch(min_numel=...)``, are meant for
    whole parameters, so they are divided by S here. Each shard has its own random numbers. Shared
    ones are equal on all replicas.

    With tensors parallel over T ranks, a rank's block of a parameter takes the parameter's place.
    These T ranks draw the same random numbers: what they have copies of stays equal on them.

    Args:
        configuration: of the engines, as the user has given it.

    Attributes:
        shard: this rank's index among the ranks over which FSDP2 shards.
        shards: S.
        tensor_rank: this rank's index among those that have a tensor together.
        tensor_ranks: T.
        blocks: parameter -> this rank's block, of those in ``names`` that are in shards.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.shard, self.shards = 0, 1
        self.tensor_rank, self.tensor_ranks = 0, 1
        self.blocks: dict[Tensor, Block] = {}

    def stand(self, shards: dist.ProcessGroup, tensors: dist.ProcessGroup | None) -> None:
        """Learn this rank's place, before parameters are named.

        Args:
            shards: the group over which FSDP2 shards.
            tensors: the tensor-parallel group; None: tensors are not parallel.
        """
        self.shard, self.shards = dist.get_rank(shards), dist.get_world_size(shards)
        if tensors is not None:
            self.tensor_rank, self.tensor_ranks = tensors.rank(), tensors.size()

    def name(self, module: nn.Module) -> None:
        """Set ``names`` to the trained parameters of ``module`` that have elements."""
        super().name(module)
        self.names = {param: name for param, name in self.names.items() if param.numel()}
        # Parameters outside of all units have none: ranks refuse them when they meet.
        dims: dict[Tensor, int] = {p: u.mesh.ndim for u in units_of(module) for p in u.params}
        blocks = {p: block_of(p, dims[p], self.tensor_ranks) for p in self.names if p in dims}
        self.blocks = blocks

    def make_engine(self, worker: int, workers: int) -> Engine:
        """Return an engine without state for this rank's shards."""
        whole = self.configuration
        compressor = for_shards(whole.compressor, self.shards)
        seed = seed_of_shard(whole.seed, self.shard)
        part = dataclasses.replace(whole, compressor=compressor, seed=seed)
        return part.engine(worker, workers)

    def place(self) -> dict[str, int]:
        """Return which shard this rank has, of a replica's S·T."""
        ranks = self.tensor_ranks
        return {"shard": self.shard * ranks + self.tensor_rank, "shards": self.shards * ranks}

    def regroup(self, layout: Sequence[Sequence[str]]) -> None:
        """Do nothing: buckets of shards have one layout from the first round on."""

    @property
    def parts(self) -> dict[str, ShardPart]:
        """Parameter name -> this process's part of it."""
        places = self.shard, self.shards
        return {name: self.blocks[param].shard(*places) for param, name in self.names.items()}

    @property
    def copies(self) -> dict[str, int]:
        """Parameter name -> ranks of a replica that have the same part of it."""
        return {name: self.blocks[param].copies for param, name in self.names.items()}

    def _largest(self, param: Tensor) -> tuple[int, ...]:
        """Return the first shard's shape, the same on all ranks."""
        return self.blocks[param].shard(0, self.shards).sizes


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
        block = self.blocks[param]
        return Cut(block.part.sizes, block.dim, self.shards)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> its block's shape: a rank keeps errors of complete blocks."""
        return {name: part.sizes for name, part in self.parts.items()}

    @property
    def parts(self) -> dict[str, ShardPart]:
        """Parameter name -> this rank's block."""
        return {name: self.blocks[param].part for param, name in self.names.items()}

    def place(self) -> dict[str, int]:
        """Return nothing, as each rank is a worker; of parallel tensors which part it has."""
        if self.tensor_ranks == 1:
            return {}
        return {"shard": self.tensor_rank, "shards": self.tensor_ranks}

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
        self, made: Configuration, worker: int, workers: int, cuts: Mapping[str, Cut]
    ) -> None:
        super().__init__(
            made.compressor,
            made.memory,
            made.scheme,
            worker=worker,
            workers=workers,
            seed=made.seed,
        )
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
    device_type: str, replicas: int, shards: int, timeout: timedelta | None, tensor_ranks: int = 1
) -> DeviceMesh:
    """Return a mesh ``(R, S, T)`` over all ranks; those of a replica follow each other.

    ``init_device_mesh`` gives its groups torch's default timeout, 10 to 30 minutes, for which the
    other ranks of a node would wait for one that hangs.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        replicas: R.
        shards: S.
        timeout: of all collectives in the mesh's groups; None: torch's default.
        tensor_ranks: T, ranks that have the parts of a parameter, next to each other.

    Communication pattern:
        All ranks make all groups, in the same order.
    """
    shape = replicas, shards, tensor_ranks
    mesh = torch.arange(math.prod(shape), device="cpu").view(shape)
    of_each = (
        mesh.flatten(1).t(),
        mesh.transpose(1, 2).reshape(-1, shards),
        mesh.view(-1, tensor_ranks),
    )
    groups = [own_group(rows.tolist(), timeout) for rows in of_each]
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=NAMES)
