"""Running statistics and other buffers of a module, as W workers would have them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Buffers:
    """Gives every simulated worker the module's buffers as DDP would.

    DDP copies worker 0's buffers to all workers before each step's first forward pass. So all
    begin a step with the same, each goes on with its own, and only worker 0's outlive the step.

    All are copied, as DDP does: batch normalisation writes to its own unseen by any version count.

    Args:
        buffers: of the module; what is changed in place is followed.
        workers: W.
    """

    def __init__(self, buffers: Iterable[Tensor], workers: int) -> None:
        self._live = list(buffers) if workers > 1 else []
        self._start = [buffer.clone() for buffer in self._live]
        self._own: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        """Begin a step with what the buffers hold now."""
        self._own.clear()
        self._copy(self._start, self._live)

    def enter(self, worker: int) -> None:
        """Put this worker's buffers in place, before its forward pass."""
        self._copy(self._live, self._own.get(worker, self._start))

    def leave(self, worker: int, again: bool) -> None:
        """Keep what it has written, if that is needed: by its next micro-batch, or as worker 0's.

        Args:
            worker: whose micro-batch it was.
            again: whether it may have another one in this step.
        """
        if again or worker == 0:
            self._own[worker] = [buffer.clone() for buffer in self._live]

    def end(self) -> None:
        """End a step: worker 0's buffers are those of all."""
        self.enter(0)

    @staticmethod
    def _copy(to: list[Tensor], values: list[Tensor]) -> None:
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, values)
