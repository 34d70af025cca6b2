"""GradientDifferences: base of memories that compress gradients minus their estimates."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class GradientDifferences(Memory):
    """Compresses ``g − h``, where h is a worker's estimate of its gradient, which follows it.

    All workers keep the mean of all estimates too, to which they add the mean of what was sent.
    """

    # The first is what is compressed: compression in place must not change the estimate.
    buffers = ("error", "estimate", "mean_estimate")
    common = ("mean_estimate",)
    # A gradient of zero differs from the estimate like any other, and the estimate follows: it is
    # applied whether or not a worker sends.
    unused = "send"
    # A step's error is not added to a later gradient; the next difference contains it.
    conserves = accumulates = False

    @property
    @abc.abstractmethod
    def follows(self) -> float:
        """Share of what was sent by which the estimate moves, in (0, 1]."""

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        error, estimate, common = (state[name] for name in self.buffers)
        sent = torch.sub(bucket.grad, estimate, out=error).clone()
        mean = yield from exchange(error)
        sent.sub_(error)
        # Where a gradient was not finite, all workers leave their estimates, or these would never
        # again have the mean that is kept of them.
        valid = mean.isfinite().all()
        estimate.add_(sent.mul_(self.follows).masked_fill_(~valid, 0))
        moved = torch.where(valid, mean, 0).mul_(self.follows)
        mean.add_(common)
        common.add_(moved)
