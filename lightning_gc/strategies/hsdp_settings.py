"""HSDP's settings: refuse those that cannot be, and find the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_gc.synchronizer.fsdp_units import has_hooks
from lightning_gc.synchronizer.shard_validation import check_bucket_cap


def check_settings(
    owner: str, replicas: Any, bucket_cap_mb: Any, mesh_arguments: Mapping[str, Any]
) -> None:
    """Raise ValueError for settings that cannot be; RuntimeError for a torch without the hook.

    Args:
        owner: the class, for the sentence.
        replicas: as given, like the next.
        bucket_cap_mb: megabytes.
        mesh_arguments: ``ModelParallelStrategy``'s, but for those with their default, which
            LightningCLI gives.
    """
    if not has_hooks():
        raise RuntimeError(
            f"{owner} needs torch 2.7 or later, whose FSDP2 has set_all_reduce_hook; this is torch "
            f"{torch.__version__}. Install a newer one, or use CompressedDDPStrategy."
        )
    if replicas != "auto" and not (type(replicas) is int and replicas >= 1):
        raise ValueError(
            f"{owner}(replicas={replicas!r}): give the number of replicas of the model, at least "
            f"1, or 'auto', one per node."
        )
    check_bucket_cap(owner, bucket_cap_mb)
    for name, fix in (
        ("data_parallel_size", "it follows from replicas; leave it out"),
        ("tensor_parallel_size", "tensor parallelism has not been tried with it; leave it out"),
    ):
        if name in mesh_arguments:
            raise ValueError(f"{owner}({name}={mesh_arguments[name]!r}): {fix}.")


def replicas_of(owner: str, replicas: Any, ranks: int, nodes: int) -> int:
    """Return R; ValueError if so many replicas cannot share the ranks equally."""
    number = nodes if replicas == "auto" else int(replicas)
    if ranks % number:
        divisors = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
        raise ValueError(
            f"{owner}(replicas={replicas!r}): {ranks} ranks cannot be shared out equally among "
            f"{number} replicas; use one of {', '.join(divisors)}."
        )
    return number
