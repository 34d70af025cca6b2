"""fp16 loss scaling: unscale gradients, and roll errors back when the scaler skips a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class LossScaling:
    """Keeps errors in unscaled units, and as they were before a step that was skipped.

    A scaler skips the optimizer step when a gradient is not finite. The result of the round is then
    lost, so the errors must be what they were before it. Whether it was is known on the device
    only, so the copies are put back when the next round begins.

    Attributes:
        scale: what gradients have been multiplied by, as a 0-dim tensor, or None.
        revocable: a step may be skipped. Costs a copy of the memory.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.revocable = False
        self._flags: list[Tensor] = []  # (1,) each: NaN where a bucket was not finite
        self._before: list[tuple[Tensor, Tensor]] = []  # (live flat buffer, its copy)

    def back_up(self, buffers: Iterable[Tensor]) -> None:
        """Copy buffers that a round is about to change."""
        self._before += [(buffer, buffer.clone()) for buffer in buffers]

    def note(self, flag: Tensor) -> None:
        """Take down whether a bucket's result is finite: zero or NaN, ``(1,)``."""
        self._flags.append(flag)

    def settle(self) -> None:
        """Roll back the last round if its result was not finite: its step has been skipped."""
        if self._flags:
            skipped = ~torch.stack(self._flags).isfinite().all()
            for live, copy in self._before:
                if live.device.type != "cpu":
                    torch.where(skipped, copy, live, out=live)
                elif skipped:
                    live.copy_(copy)
        self.forget()

    def forget(self) -> None:
        """Drop the copies: the round stands."""
        self._flags.clear()
        self._before.clear()
