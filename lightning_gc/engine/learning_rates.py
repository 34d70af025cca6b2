"""LearningRates: rescale errors when the learning rate changes, so that rate · error is kept."""

from __future__ import annotations

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.engine.error_buffers import Buffers


class LearningRates:
    """Rescales errors by γ_{t−1}/γ_t, for memories that are ``lr_aware``.

    Attributes:
        now: parameter name -> learning rate γ_t of this round's step.
        of_errors: parameter name -> learning rate to which its error is scaled.
    """

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.of_errors: dict[str, float] = {}

    def follow(self, buffers: Buffers) -> None:
        """Rescale errors to the learning rates ``now``; a rate of 0 is ignored."""
        for name, rate in self.now.items():
            if rate == 0:
                continue
            ratio = self.of_errors.get(name, rate) / rate
            self.of_errors[name] = rate
            if ratio != 1:
                for kept in buffers.named.get(name, {}).values():
                    kept.mul_(ratio)

    def back_up(self, bucket: Bucket, buffers: Buffers) -> list[tuple[Tensor, Tensor]]:
        """Return errors of parameters with learning rate 0, and copies to restore after the round.

        In units of the update, a step at learning rate 0 changes no error. The gradient is sent all
        the same: an optimizer may average it.
        """
        if 0 not in self.now.values():
            return []
        buffers.flat(bucket)  # creates them if new
        names = [name for name in bucket.names if self.now.get(name) == 0]
        views = [view for name in names for view in buffers.named[name].values()]
        return [(view, view.clone()) for view in views]
