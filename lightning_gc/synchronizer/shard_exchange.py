"""ShardExchange: compressed exchange of one rank's shards of an FSDP2 model with its replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gc.synchronizer.equal_start import broadcast_all
from lightning_gc.synchronizer.fsdp_units import units_of
from lightning_gc.synchronizer.joint_errors import on_all_ranks
from lightning_gc.synchronizer.parts import ShardParts
from lightning_gc.synchronizer.shard_buckets import MEGABYTE, ShardBuckets
from lightning_gc.synchronizer.shard_validation import refuse_unlike_shards
from lightning_gc.synchronizer.sharded_workers import ShardedWorkers
from lightning_gc.synchronizer.synchronizer import Synchronizer
from lightning_gc.synchronizer.validation import (
    check_agreement,
    digest_of,
    refuse_sparse_gradients,
)
from lightning_gc.transports.distributed import Distributed, gather_text


class ShardExchange:
    """Checks the model on all ranks, lets replicas start alike, and listens to FSDP2's units.

    Args:
        model: sharded by FSDP2 over the ranks of ``node``, on all ranks of the default group.
        workers: engine and parameter names of this rank; ``node`` says which shard it has.
        node: the group of ranks that have a replica together.
        between: the group of ranks that have the same shards.
        columns: global ranks of all such groups.
        device: of the gradients.
        mesh_dims: dimensions of the mesh on which parameters are.
        bucket_cap_mb: megabytes of this rank's shards from which on a bucket is full.
        agreed: name -> text of other settings that must be equal on all ranks.
        timeout: of every collective.
        before_round: called before the first bucket of each round.

    Attributes:
        synchronizer: exchanges buckets with the replicas.
        buckets: joins units into buckets.
        parts: sums over the ranks of the node.

    Raises:
        ValueError: on all ranks, if one's model is not as it must be, or ranks differ.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: ShardedWorkers,
        node: dist.ProcessGroup,
        between: dist.ProcessGroup,
        columns: Sequence[Sequence[int]],
        device: torch.device,
        *,
        mesh_dims: int,
        bucket_cap_mb: float,
        agreed: Mapping[str, str],
        timeout: timedelta | None,
        before_round: Callable[[], None],
    ) -> None:
        self._workers, self._device = workers, device
        workers.shard, workers.shards = dist.get_rank(node), dist.get_world_size(node)
        ranks = dist.get_process_group_ranks(node)
        on_all_ranks(partial(_check, model, ranks, mesh_dims), device)
        workers.name(model)
        replicas = dist.get_world_size(between)
        whole = {name: tuple(param.shape) for param, name in workers.names.items()}
        same = workers.configuration.in_words() | {
            "replicas and shards": repr((replicas, workers.shards)),
            "bucket_cap_mb": repr(bucket_cap_mb),
            "names and shapes of parameters": digest_of(whole),
        }
        check_agreement(same | dict(agreed), Distributed(), device)
        sharded, plain = list[Tensor](), list[Tensor]()  # plain: ignored_params, which are frozen
        for param in model.parameters():
            (sharded if isinstance(param, DTensor) else plain).append(param)
        broadcast_all(map(workers.local, sharded), between)
        broadcast_all((*plain, *model.buffers()))
        self.parts = ShardParts(node, device)
        on_all_ranks(partial(self._synchronize, between, columns, timeout, before_round), device)
        workers.run = gather_text(workers.run, Distributed(), device)[0]
        self.buckets = ShardBuckets(
            units_of(model),
            workers.names,
            bucket_cap_mb * MEGABYTE,
            self.synchronizer.submit,
            self.synchronizer.check,
            self.synchronizer.end_round,
        )

    def _synchronize(
        self,
        between: dist.ProcessGroup,
        columns: Sequence[Sequence[int]],
        timeout: timedelta | None,
        before_round: Callable[[], None],
    ) -> str:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(between)))
        self.synchronizer = Synchronizer(
            self._workers,
            self._device,
            between,
            timeout,
            before_round=before_round,
            purpose=(
                f"an exchange of gradients between replicas; their workers 0, 1, ... are the ranks "
                f"{ranks}"
            ),
            groups=columns,
        )
        return ""


def _check(model: nn.Module, node: Sequence[int], mesh_dims: int) -> str:
    refuse_sparse_gradients(model)
    refuse_unlike_shards(model, node, mesh_dims)
    return ""
