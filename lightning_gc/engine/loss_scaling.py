"""LossScaling: roll errors back when an fp16 gradient scaler skips the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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
