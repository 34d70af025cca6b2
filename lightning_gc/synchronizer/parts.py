"""Parts of a worker: sums and norms of whole parameters, where each process has a shard of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.transports.peer_error import naming_peers


class Parts:
    """A worker that is one process: what it has is whole."""

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the worker's processes."""
        return tensor

    def norms(self, norms: Tensor) -> Tensor:
        """Return the norms of whole tensors, given those of this process's parts of them."""
        return norms

    def norms_of(self, norms: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
        """Return the same by name.

        Args:
            norms: parameter name -> norm of this process's part.
            names: of all parameters, in an order that is equal on all processes.
        """
        return dict(norms)


class ShardParts(Parts):
    """A worker whose parameters are shared out among the processes of a group.

    Args:
        group: these processes.
        device: one that the group's backend can send from.

    Communication pattern:
        Each method is one all-reduce of float64 numbers in the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group, in float64."""
        there = tensor.to(self._device, torch.float64, copy=True)
        me, ranks = dist.get_rank(self._group), dist.get_process_group_ranks(self._group)
        purpose = (
            f"sums over the shards of a node, whose workers 0, 1, ... are the ranks "
            f"{', '.join(map(str, ranks))}"
        )
        with naming_peers("all-reduce", purpose, me, len(ranks)):
            dist.all_reduce(there, group=self._group)
        return there

    def norms(self, norms: Tensor) -> Tensor:
        """Return the norms of whole tensors, in float64."""
        return self.total(norms.double().square()).sqrt()

    def norms_of(self, norms: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
        """Return the same by name; what this process has not, as an empty shard, counts as 0."""
        every = list(names)
        whole = self.norms(
            torch.tensor(
                [norms.get(name, 0.0) for name in every], dtype=torch.float32, device="cpu"
            )
        ).tolist()
        return dict(zip(every, whole, strict=True))
