"""AttachedShards: compressed exchange between the replicas of an FSDP2 model, without Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_gc.attachment.attached import Attached, check_settings
from lightning_gc.controllers import Controller
from lightning_gc.exchange.module_hooks import ModuleHook
from lightning_gc.exchange.workers import Configuration
from lightning_gc.sharded.fsdp_units import Unit, has_hooks, units_of
from lightning_gc.sharded.shard_exchange import ShardExchange
from lightning_gc.sharded.shard_validation import refuse_new_parameters, refuse_whole_gradients
from lightning_gc.sharded.sharded_workers import ShardedWorkers


class AttachedShards(Attached):
    """Handle of an FSDP2 model on a mesh of replicas and shards.

    FSDP2's own all-reduce over replicas is switched off, and back on by ``close``.

    Args:
        model: on which ``fully_shard`` was called last; the others as for ``attach``.
        configuration: compressor, memory and scheme.
        controller: or None.
        optimizers: of the model's parameters.
        timeout: of every collective.
        bucket_cap_mb: megabytes of a rank's shards from which on a bucket is full.
    """

    def __init__(
        self,
        model: nn.Module,
        configuration: Configuration,
        controller: Controller | None,
        optimizers: list[torch.optim.Optimizer],
        timeout: timedelta | None,
        bucket_cap_mb: float,
    ) -> None:
        check_settings(configuration, controller, optimizers)
        refuse_whole_gradients("attach", controller)
        self._units = units_of(model)
        mesh = replicated_mesh(self._units)
        between, node = mesh.get_group(0), mesh.get_group(1)
        workers = ShardedWorkers(configuration)
        device = next(iter(self._units[0].params)).to_local().device  # type: ignore[attr-defined]
        for unit in self._units:
            unit.stay_within_node()
        try:
            self._exchange = ShardExchange(
                model,
                workers,
                node,
                between,
                mesh.mesh.t().tolist(),
                device,
                mesh_dims=2,
                bucket_cap_mb=bucket_cap_mb,
                agreed={"controller": repr(controller)},
                timeout=timeout,
                before_round=partial(workers.prepare_round, None, optimizers),
            )
        except BaseException:
            self._replicate()
            raise
        synchronizer, parts = self._exchange.synchronizer, self._exchange.parts
        super().__init__(
            workers, synchronizer, controller, optimizers, device, between, None, parts
        )
        self._watching = model.register_forward_hook(ModuleHook(self._refuse_unsynchronised).watch)

    def _refuse_unsynchronised(self, model: nn.Module) -> None:
        self._exchange.buckets.refuse_interrupted()
        refuse_new_parameters(model, self._exchanged, self._optimizers)

    def _replicate(self) -> None:
        for unit in self._units:
            unit.replicate()

    def _detach(self) -> None:
        self._watching.remove()
        self._exchange.buckets.close()
        self._replicate()


def replicated_mesh(units: Sequence[Unit]) -> DeviceMesh:
    """Return the mesh of replicas and shards that all units are on.

    Raises:
        ValueError: they are on another mesh, on several, or on one without all ranks.
        RuntimeError: this torch has no hook.
    """
    if not has_hooks():
        raise RuntimeError(
            f"attach(...) needs torch 2.7 or later for a model in shards, whose FSDP2 has "
            f"set_all_reduce_hook; this is torch {torch.__version__}."
        )
    for unit in units:
        if not unit.replicates:
            raise ValueError(
                f"attach(...): {unit.name} is sharded over all of its mesh, so that there are no "
                f"replicas to exchange gradients with; {_DOCUMENTED}."
            )
    mesh = units[0].mesh
    for unit in units:
        if unit.mesh != mesh:
            raise ValueError(
                f"attach(...): {unit.name} is on the mesh {unit.mesh.mesh.tolist()}, but "
                f"{units[0].name} on {mesh.mesh.tolist()}; give fully_shard one mesh for all."
            )
    if mesh.ndim != 2 or mesh.size() != dist.get_world_size():
        raise ValueError(
            f"attach(...): the model is on the mesh {mesh.mesh.tolist()}, but all "
            f"{dist.get_world_size()} ranks must be in it, as replicas and shards; {_DOCUMENTED}."
        )
    return mesh


_DOCUMENTED = (
    'give fully_shard a mesh such as init_device_mesh("cuda", (nodes, ranks_of_a_node), '
    'mesh_dim_names=("replicate", "shard"))'
)
