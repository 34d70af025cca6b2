"""LossScaling: roll errors back when an fp16 gradient scaler skips the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class LossScaling:
    """Restores errors after a skipped optimizer step, and holds the loss scale.

    A scaler skips the step if a gradient is not finite. The round's result is then lost, so its
    errors must be rolled back. Whether it was skipped is known on the device only, so they are
    rolled back when the next round begins.

    Attributes:
        scale: factor of the gradients, a 0-dim tensor, or None.
        revocable: steps may be skipped. Costs a copy of the memory's buffers.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.revocable = False
        self._flags: list[Tensor] = []  # (1,) per bucket: NaN if its result is not finite, else 0
        self._before: list[tuple[Tensor, Tensor]] = []  # (live flat buffer, its copy)

    def back_up(self, buffers: Iterable[Tensor]) -> None:
        """Copy buffers before a round changes them."""
        self._before += [(buffer, buffer.clone()) for buffer in buffers]

    def note(self, flag: Tensor) -> None:
        """Store a bucket's flag, ``(1,)``: 0 if its result is finite, else NaN."""
        self._flags.append(flag)

    def settle(self) -> None:
        """Roll the last round back if its result was not finite, since its step was skipped."""
        if self._flags:
            skipped = ~torch.stack(self._flags).isfinite().all()
            for live, copy in self._before:
                if live.device.type != "cpu":
                    torch.where(skipped, copy, live, out=live)
                elif skipped:
                    live.copy_(copy)
        self.forget()

    def forget(self) -> None:
        """Drop flags and copies."""
        self._flags.clear()
        self._before.clear()
