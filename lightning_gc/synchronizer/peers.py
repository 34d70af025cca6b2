"""Peers: what a control loop asks of the other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.synchronizer.parts import Parts


@dataclass(frozen=True)
class Peers:
    """Communication of the control loop.

    Attributes:
        decides: this process has worker 0, whose controller decides.
        device: one that the group's backend can send from.
        mean: returns a tensor's mean over workers.
        parts: sums over the parts of a worker, where several processes have them.
        group: of all processes; None is the default group.
    """

    decides: bool
    device: torch.device
    mean: Callable[[Tensor], Tensor]
    parts: Parts = Parts()  # noqa: RUF009 - has no state
    group: dist.ProcessGroup | None = None

    def mean_of(self, rows: Iterable[Sequence[float]]) -> list[float]:
        """Return the mean over workers, in one message; one row per worker of this process."""
        mean: list[float] = self.mean(self._packed(rows)).tolist()
        return mean

    def whole_of(self, rows: Iterable[Sequence[float]]) -> list[float]:
        """Return the same of sums over elements, of which those of a worker's parts are added."""
        mean: list[float] = self.parts.total(self.mean(self._packed(rows))).tolist()
        return mean

    def _packed(self, rows: Iterable[Sequence[float]]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.float64, device=self.device).mean(0)
