"""Keep errors in units of the update, learning rate times gradient, when the rate changes."""

from __future__ import annotations

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.engine.error_buffers import ErrorBuffers

Copies = list[tuple[Tensor, Tensor]]
"""Pairs of a live tensor and its copy."""


class LearningRates:
    """Rescales errors by γ_{t−1}/γ_t, for memories that are ``lr_aware``.

    Attributes:
        now: parameter name -> learning rate γ_t of this round's step.
        of_errors: parameter name -> the rate at which its error is in units of the update.
    """

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.of_errors: dict[str, float] = {}

    def follow(self, buffers: ErrorBuffers) -> None:
        """Keep γ·e when γ changes. A rate of zero moves nothing: the last other one is kept."""
        for name, rate in self.now.items():
            if rate == 0:
                continue
            ratio = self.of_errors.get(name, rate) / rate
            self.of_errors[name] = rate
            if ratio != 1:
                for kept in buffers.named.get(name, {}).values():
                    kept.mul_(ratio)

    def back_up(self, bucket: Bucket, buffers: ErrorBuffers) -> Copies:
        """Copy the errors of parameters whose learning rate is 0; to be put back after the round.

        In units of the update, a step at learning rate 0 neither adds γ·g to an error nor takes
        anything out of it. The gradient is sent all the same: an optimizer may average it.
        """
        if 0 not in self.now.values():
            return []
        buffers.flat(bucket)  # lays them out where they are new
        names = [name for name in bucket.names if self.now.get(name) == 0]
        views = [view for name in names for view in buffers.named[name].values()]
        return [(view, view.clone()) for view in views]
