"""NoMemory: compress the gradient itself, without error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class NoMemory(Memory):
    """Compress the gradient itself and drop the error.

    Right for unbiased compressors: their errors average out. Costs nothing. Within one step what
    was sent and the dropped error add up to the gradient.

    Example:
        >>> from lightning_gc import NoMemory
        >>> NoMemory().buffers
        ()
    """

    conserves = False
    feeds_back = accumulates = False

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        yield from exchange(bucket.grad)
