"""FSDPWorkers: the engine of a rank whose gradients are whole, and whose mean is its own shards."""

from __future__ import annotations

from torch import Tensor

from lightning_gc.engine import Engine
from lightning_gc.synchronizer.sharded_workers import ShardedWorkers, dim_of, shard_shape


class FSDPWorkers(ShardedWorkers):
    """One rank of FSDP2 is one worker: it compresses its gradient of whole parameters.

    A parameter of shape ``(n, ...)`` counts as ``(W·⌈n/W⌉, ...)``, as FSDP2 pads it. So limits of
    size are those of whole parameters, and all ranks decide alike. Random numbers of ranks differ
    by the worker's index, where they must not be equal.
    """

    def _engine(self, worker: int, workers: int) -> Engine:
        return self.configuration.engine(worker, workers)

    def _largest(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape by which a parameter counts as compressed."""
        return stacked(shard_shape(tuple(param.shape), dim_of(param), self.shards), self.shards)


def stacked(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the shape of ``shards`` pieces of one shape, one below the other."""
    return (shards * shape[0], *shape[1:])
