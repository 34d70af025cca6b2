"""WeightedError: add a share of all past quantisation errors to the gradient (ECQ-SGD)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow, Range
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class WeightedError(Memory):
    """Add a share of the accumulated quantisation errors to the gradient.

    ``h_t = β·h_{t−1} + (g_{t−1} − q_{t−1})``, ``q_t = C(g_t + α·h_t)``. The error is relative to
    the gradient, not to what was compressed. α = β = 1 is ``ErrorFeedback``: h is then the error,
    and nothing is lost. An unbiased quantiser's error may exceed the gradient's norm and would grow
    if fed back whole; a small share of it reduces the variance. Costs two float32 per parameter and
    worker.

    Args:
        alpha: share of the accumulated errors that is added, in (0, 1]. Higher corrects more, but
            is less stable.
        beta: weight of older errors, in [0, 1]. Higher accumulates over more steps.

    Example:
        >>> from lightning_gc import WeightedError
        >>> WeightedError().buffers
        ('error', 'history')

    Reference:
        Wu, Huang, Huang and Zhang, "Error Compensated Quantized SGD and its Applications to
        Large-scale Distributed Optimization", ICML 2018. The defaults are ours.
    """

    alpha: float = 0.2
    beta: float = 0.9
    limits = {"alpha": "(0, 1]", "beta": "[0, 1]"}

    buffers = ("error", "history")
    space = (Range("alpha", 0.02, 1.0, scale="log"), Range("beta", 0.5, 1.0))

    @property
    def conserves(self) -> bool:
        return self.alpha == self.beta == 1

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        error, history = state["error"], state["history"]
        # The compressor left g + α·h − q; subtracting α·h gives g − q.
        history.mul_(self.beta - self.alpha).add_(error)
        yield from exchange(error.copy_(bucket.grad).add_(history, alpha=self.alpha))

    @classmethod
    def examples(cls) -> tuple[WeightedError, ...]:
        return (cls(), cls(alpha=1.0, beta=1.0))
