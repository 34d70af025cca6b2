"""LossScaling: roll errors back when an fp16 gradient scaler skips the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.engine.error_buffers import Buffers


class LossScaling:
    """Restores errors after a skipped optimizer step, and holds the loss scale.

    A scaler skips the step if a gradient is not finite. The round's result is then lost, so its
    errors are rolled back, when the next round begins: only the device knows of it.

    Attributes:
        scale: factor of the gradients, a 0-dim tensor, or None.
        revocable: steps may be skipped. Costs a copy of the memory's buffers.
        verdicts: per bucket of the last round, a bool tensor: whether its result is finite, as the
            scaler sees it. That is more than finite gradients: a sum may overflow.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.revocable = False
        self.verdicts: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # (live flat buffer, its copy)

    def back_up(self, buffers: Iterable[Tensor]) -> None:
        """Copy buffers before a round changes them."""
        self._before += [(buffer, buffer.clone()) for buffer in buffers]

    def settle(self) -> None:
        """Roll the last round back if its result was not finite, since its step was skipped."""
        if self.verdicts:
            skipped = ~torch.stack(self.verdicts).all()
            for live, copy in self._before:
                if live.device.type != "cpu":
                    torch.where(skipped, copy, live, out=live)
                elif skipped:
                    live.copy_(copy)
        self.forget()

    def forget(self) -> None:
        """Drop verdicts and copies."""
        self.verdicts.clear()
        self._before.clear()


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
