"""Buffers: a module's buffers, such as running statistics, per simulated worker as in DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def refuse_pass_for_statistics(trainer: Any, module: Any) -> None:
    """Raise ValueError if Lightning will add an epoch without backward passes after training.

    It does so for averaged weights, to collect the running statistics of batch normalisation.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    for callback in trainer.callbacks:
        averages = "StochasticWeightAveraging" in {c.__name__ for c in type(callback).__mro__}
        if averages and norms:
            raise ValueError(
                f"{type(callback).__name__} collects the running statistics of {norms[0]} in an "
                f"epoch without backward passes, in which simulated workers cannot take turns. Use "
                f"CompressedDDPStrategy with processes, or a normalisation without running "
                f"statistics, such as GroupNorm."
            )


class Buffers:
    """Keeps the module's buffers of every simulated worker as DDP would.

    DDP copies worker 0's buffers to all workers before each step's first forward pass. So all start
    a step with equal buffers, each changes its own, and only worker 0's are kept. All are copied:
    batch normalisation changes buffers without a version count.

    Args:
        module: whose buffers are changed in place; to a name it may assign a new one.
        workers: W.
    """

    def __init__(self, module: nn.Module, workers: int) -> None:
        self._module = module if workers > 1 else nn.Module()
        self._start = [buffer.clone() for buffer in self._live]
        self._own: dict[int, list[Tensor]] = {}

    @property
    def _live(self) -> list[Tensor]:
        return list(self._module.buffers())

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
