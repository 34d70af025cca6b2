"""GlobalMomentum: error feedback, with momentum of the mean update added before compression."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow, Range
from lightning_gc.memories.base import GradientExchange, OwnMomentum, State


@dataclass(frozen=True)
class GlobalMomentum(OwnMomentum):
    """Add momentum of the last applied mean to the gradient, and feed errors back.

    ``x_t = e_{t−1} + g_t + β·a_{t−1}``, ``e_t = x_t − C(x_t)``, with a_t the mean that all workers
    applied in step t. The paper's a is ``−(w_t − w_{t−1})/η``, which is the same under plain SGD
    with a constant learning rate. If everything is sent, it is SGD with momentum β.

    Nothing is lost of ``g_t + β·a_{t−1}``. Costs two float32 per parameter and worker. Use plain
    SGD: momentum in the optimizer would be added to this one.

    Args:
        momentum: β, in [0, 1). Higher averages over more steps.

    Raises:
        ValueError: ``momentum`` outside [0, 1); at fit start, an optimizer with momentum.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, GlobalMomentum, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), memory=GlobalMomentum(0.9))

    Reference:
        Zhao, Xie and Li, "Global Momentum Compression for Sparse Communication in Distributed
        Learning", 2019.
    """

    buffers = ("error", "applied")
    space = (Range("momentum", 0.1, 0.9),)
    common = ("applied",)

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        buffer = state["error"].add_(bucket.grad).add_(state["applied"], alpha=self.momentum)
        mean = yield from exchange(buffer)
        state["applied"].copy_(mean)
