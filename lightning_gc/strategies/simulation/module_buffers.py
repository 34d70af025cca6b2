"""Buffers: a module's buffers, such as running statistics, per simulated worker as in DDP."""

from __future__ import annotations

from collections.abc import Mapping
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

    A buffer that one worker registers or resizes is also the next one's: workers share what else
    the module knows of it, such as how far a table of positions reaches.

    Args:
        module: whose buffers are changed in place; to a name it may assign a new one.
        workers: W.
    """

    def __init__(self, module: nn.Module, workers: int) -> None:
        self._module = module if workers > 1 else nn.Module()
        self._start = self._copies({})
        self._own: dict[int, dict[str, Tensor]] = {}

    @property
    def _live(self) -> dict[str, Tensor]:
        return dict(self._module.named_buffers())

    def begin(self) -> None:
        self._own.clear()
        self._start = self._copies(self._start)

    def enter(self, worker: int) -> None:
        """Load this worker's buffers: before its forward pass; worker 0's at the end of a step."""
        _copy(self._own.get(worker, self._start), self._live)

    def leave(self, worker: int, again: bool) -> None:
        """Save this worker's buffers: worker 0's, or if it has another micro-batch (``again``)."""
        if again or worker == 0:
            self._own[worker] = self._copies({})

    def _copies(self, into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the module's buffers, in the memory of ``into`` where it fits."""
        live = self._live
        fits = _copy(live, into)
        return {n: into[n] if n in fits else live[n].detach().clone() for n in live}


def _copy(values: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> list[str]:
    """Copy by name where shapes and dtypes are equal; return these names."""
    fits = [
        name
        for name, each in to.items()
        if name in values and (values[name].shape, values[name].dtype) == (each.shape, each.dtype)
    ]
    if fits:
        with torch.no_grad():
            torch._foreach_copy_([to[name] for name in fits], [values[name] for name in fits])
    return fits
