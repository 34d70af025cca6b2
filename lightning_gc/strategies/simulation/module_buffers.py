"""Buffers: a module's buffers, such as running statistics, per simulated worker as in DDP."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Buffers:
    """Keeps the module's buffers of every simulated worker as DDP would.

    DDP copies worker 0's buffers to all workers before each step's first forward pass. So all start
    a step with equal buffers, each changes its own, and only worker 0's are kept. All are copied:
    batch normalisation changes buffers without a version count.

    Args:
        buffers: the module's, changed in place.
        workers: W.
    """

    def __init__(self, buffers: Iterable[Tensor], workers: int) -> None:
        self._live = list(buffers) if workers > 1 else []
        self._start = [buffer.clone() for buffer in self._live]
        self._own: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        self._own.clear()
        self._copy(self._start, self._live)

    def enter(self, worker: int) -> None:
        """Load this worker's buffers: before its forward pass; worker 0's at the end of a step."""
        self._copy(self._live, self._own.get(worker, self._start))

    def leave(self, worker: int, again: bool) -> None:
        """Save this worker's buffers: worker 0's, or if it has another micro-batch (``again``)."""
        if again or worker == 0:
            self._own[worker] = [buffer.clone() for buffer in self._live]

    @staticmethod
    def _copy(to: list[Tensor], values: list[Tensor]) -> None:
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, values)
