"""LocalMomentum: compress each worker's moving average of gradients, without error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow, Range
from lightning_gc.memories.base import GradientExchange, OwnMomentum, State


@dataclass(frozen=True)
class LocalMomentum(OwnMomentum):
    """Compress each worker's moving average of gradients, without error feedback.

    ``m_t = β·m_{t−1} + (1 − β)·g_t``, and ``m_t`` is compressed. For ``Signum``: the sign of an
    average over steps is less noisy than the sign of one gradient.

    Costs two float32 per parameter and worker. The optimizer must not have momentum.

    Args:
        momentum: β, in [0, 1). Higher averages over more steps.

    Raises:
        ValueError: ``momentum`` outside [0, 1); at fit start, an optimizer with momentum.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, LocalMomentum, SignSGD
        >>> strategy = CompressedDDPStrategy(SignSGD(), memory=LocalMomentum(0.9))

    Reference:
        Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: Compressed Optimisation for
        Non-Convex Problems", ICML 2018.
    """

    # The first is a scratch buffer: compression in place must not change the average.
    buffers = ("error", "momentum")
    space = (Range("momentum", 0.5, 0.99),)
    feeds_back = accumulates = False

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        average = state["momentum"]
        average.mul_(self.momentum).add_(bucket.grad, alpha=1 - self.momentum)
        yield from exchange(state["error"].copy_(average))
