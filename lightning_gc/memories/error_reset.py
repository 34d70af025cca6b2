"""ErrorReset: error feedback that sends the error uncompressed every N steps."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class ErrorReset(Memory):
    """Feed errors back, and send them uncompressed every ``every`` steps.

    ``x_t = e_{t−1} + g_t``, ``e_t = x_t − C(x_t)``; in every ``every``-th step ``x_t`` is sent
    uncompressed and ``e_t = 0``. This bounds the age of errors, which allows harder compression.
    Nothing is lost. Costs one float32 per parameter and worker, and a dense all-reduce every
    ``every`` steps: at 128, as many bytes as a density of about 0.8 %.

    Args:
        every: steps between resets, at least 1. Higher means fewer bytes and older errors.

    Example:
        >>> from lightning_gc import ErrorReset
        >>> ErrorReset(every=100)
        ErrorReset(every=100)

    Reference:
        Xie et al., "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020. Only the
        reset is from there, and it is dense here: CSER resets by a second compressor, and each
        worker applies its error to its own model at once, so that models differ between resets, as
        by the memory ``CSER``.
    """

    every: int = 128
    limits = {"every": "[1, inf) the number of steps"}

    buffers = ("error",)

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        due = (bucket.step + 1) % self.every == 0
        buffer = state["error"].add_(bucket.grad)
        yield from exchange.dense(buffer) if due else exchange(buffer)

    @classmethod
    def examples(cls) -> tuple[ErrorReset, ...]:
        return (cls(every=3),)
