"""ShardedWorkers: the engine of a worker whose parameters are shared out among a node's ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gc.engine import Engine
from lightning_gc.synchronizer.configuration import Configuration
from lightning_gc.synchronizer.workers import Workers


class ShardedWorkers(Workers):
    """One rank's part of a worker (a replica): its engine compresses this rank's shards.

    A parameter of shape ``(n, ...)`` over S shards is compressed in S pieces of ``(⌈n/S⌉, ...)``,
    the last ones shorter or empty. Limits of size, as ``SizeSwitch(min_numel=...)``, are meant for
    whole parameters, so they are divided by S here. Each shard has random numbers of its own, equal
    on all replicas where they must be.

    Args:
        configuration: of the engines, as the user has given it.

    Attributes:
        shard: this rank's index among the ranks of its replica.
        shards: S.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.shard, self.shards = 0, 1

    def _engine(self, worker: int, workers: int) -> Engine:
        whole = self.configuration
        compressor = whole.compressor.for_shards(self.shards)
        seed = seed_of_shard(whole.seed, self.shard)
        part = dataclasses.replace(whole, compressor=compressor, seed=seed)
        return part.engine(worker, workers)

    def local(self, param: Tensor) -> Tensor:
        """Return this rank's shard."""
        sharded: Any = param
        part: Tensor = sharded.to_local()
        return part

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
