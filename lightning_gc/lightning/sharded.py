"""ShardedStrategy: Lightning hooks shared by the strategies for FSDP2 models.

Joined with the ``ModelParallelStrategy`` of either package by its subclasses.
"""

from __future__ import annotations

import abc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.attachment.attached import Attached, Setup
from lightning_gc.checkpoint import shard_store
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange import JOINING
from lightning_gc.lightning.base import RealWorker
from lightning_gc.sharded.sharded_workers import ShardedWorkers, replica_mesh


class ShardedStrategy(RealWorker, abc.ABC):
    """R replicas of a model, each in shards on S·T ranks: their mesh, checks and checkpoints.

    A subclass connects to FSDP2's units when a fit begins.

    Attributes:
        tensor_parallel_size: T.
    """

    local_workers: ShardedWorkers
    tensor_parallel_size: int
    way_out = "give the strategy state='off', with which errors begin at zero"
    _kind_of_store = shard_store.ShardStore

    @abc.abstractmethod
    def _replicas_of(self, ranks: int) -> int:
        """Return R; ValueError if so many replicas cannot share the ranks."""

    @abc.abstractmethod
    def _attached_to(self, setup: Setup) -> Attached:
        """Check the model on all ranks, and listen to FSDP2's units."""

    def _setup_distributed(self) -> None:
        """Join the other ranks with a timeout of at least a minute, then set the user's."""
        with self._patiently():
            super()._setup_distributed()

    def setup_environment(self) -> None:
        """Join the other ranks; make a mesh with a replica as its ``"data_parallel"`` dimension."""
        ranks, tensor_ranks = self.num_nodes * self.num_processes, self.tensor_parallel_size
        if ranks % tensor_ranks:
            refuse(
                f"{type(self).__name__}(tensor_parallel_size={tensor_ranks}): {ranks} ranks are "
                f"not a multiple of it; use one of {', '.join(map(str, divisors_of(ranks)))}"
            )
        replicas = self._replicas_of(ranks // tensor_ranks)
        self._data_parallel_size, self._tensor_parallel_size = ranks, 1
        super().setup_environment()
        kind, timeout = self.root_device.type, self._timeout
        if kind == "cuda" and timeout is not None:  # ranks compile kernels at unlike times
            timeout = max(timeout, JOINING)
        shards = ranks // replicas // tensor_ranks
        self._device_mesh = replica_mesh(kind, replicas, shards, timeout, tensor_ranks)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank has its own data, also within one replica; tensor-parallel ranks share them."""
        ranks = self.tensor_parallel_size
        return {"num_replicas": self.workers // ranks, "rank": self.worker // ranks}

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._attach(self._attached_to)

    @property
    def mesh_shape(self) -> shard_store.Mesh:
        """R, S and T."""
        replicas, shards, tensor_ranks = self._device_mesh.shape
        return replicas, shards, tensor_ranks

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that have this rank's shards."""
        group: dist.ProcessGroup = self._device_mesh.get_group("replicate")
        return group

    @property
    def distributed_form(self) -> bool:
        """Whether a checkpoint is a folder."""
        return bool(self._save_distributed_checkpoint)

    @property
    def shard_parts(self) -> dict[str, shard_store.ShardPart]:
        """This rank's part of every trained parameter."""
        return self.local_workers.parts

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore weights and optimizers, and in a fit our state: Lightning has no later call.

        Raises:
            RuntimeError: on all ranks, before anything is loaded, if files are not those that were
                saved, or if torch could run code that they bring.
        """
        weights_only = args[0] if args else kwargs.get("weights_only")
        load = partial(super().load_checkpoint, checkpoint_path, *args, **kwargs)
        loaded: dict[str, Any] = self._store.load(
            checkpoint_path, weights_only, self._attached is not None, load
        )
        return loaded

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._attached is not None:
            self._attached.before_pass()
        super().pre_backward(closure_loss)


def divisors_of(number: int) -> list[int]:
    """Return the numbers by which a number can be divided, itself the last."""
    return [each for each in range(1, number + 1) if number % each == 0]
