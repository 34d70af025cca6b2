"""Replica mesh: a mesh of replicas and shards whose process groups have the user's timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
    groups = [_own(rows.tolist(), timeout) for rows in of_each]
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=NAMES)


def _own(every: Sequence[Sequence[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return this rank's one of disjoint groups of all ranks."""
    made = [dist.new_group(list(ranks), timeout=timeout) for ranks in every]
    return next(group for group in made if isinstance(group, dist.ProcessGroup))
