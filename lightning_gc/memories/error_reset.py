"""ErrorReset: error feedback that sends the whole error every so many steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.flow import Flow
from lightning_gc.memories.base import GradientExchange, Memory


@dataclass(frozen=True)
class ErrorReset(Memory):
    """Feed errors back, and every so many steps send them whole.

    ``x_t = e_{t−1} + g_t``, ``e_t = x_t − C(x_t)``; in every ``every``-th step ``x_t`` is sent
    uncompressed and ``e_t = 0``. No error grows older than that, so a compressor may be harder.
    Nothing is lost: the reset is by sending, not by dropping.

    Costs one float32 per parameter and worker, and a dense all-reduce every ``every`` steps: at 128
    steps, as many bytes as a density of about 0.8 %.

    Args:
        every: steps from one reset to the next, at least 1. Higher means fewer bytes, older errors.

    Raises:
        ValueError: ``every`` below 1.

    Example:
        >>> from lightning_gc import ErrorReset
        >>> ErrorReset(every=100)
        ErrorReset(every=100)

    Reference:
        Xie et al., "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020. There a
        worker's own model takes part of its error at once; for that see ``StepAhead``.
    """

    every: int = 128

    buffers = ("error",)

    def __post_init__(self) -> None:
        if self.every < 1 or self.every != int(self.every):
            raise ValueError(
                f"ErrorReset(every={self.every!r}): give a whole number of steps, at least 1."
            )

    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        """Add the gradient to the error; send that compressed, or whole."""
        due = (bucket.step + 1) % self.every == 0
        buffer = state["error"].add_(bucket.grad)
        yield from exchange.dense(buffer) if due else exchange(buffer)

    @classmethod
    def examples(cls) -> tuple[ErrorReset, ...]:
        """One that is emptied several times in a short test."""
        return (cls(every=3),)
