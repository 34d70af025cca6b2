"""StepAhead: error feedback with the gradient taken at the weights that the error leads to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.flow import Flow, Mean
from lightning_gc.memories.base import GradientExchange, Memory


@dataclass(frozen=True)
class StepAhead(Memory):
    """Feed errors back, and take each worker's gradient at the weights that its error leads to.

    ``g_t = ∇f(w_t − α·γ_t·e_{t−1})``, ``x_t = e_{t−1} + g_t``, ``e_t = x_t − C(x_t)``, γ being the
    learning rate. An error is a step that is still to be made; a gradient taken without it is stale
    when it is applied. The strategy moves the weights for the time of the forward and backward pass
    and puts them back bit by bit; validation, checkpoints and the optimizer never see them moved.

    Nothing is lost, as with ``Residual``. Costs one float32 per parameter and worker, and a copy of
    the weights while they are moved. Meant for SGD, whose step is γ times what is sent.

    Args:
        alpha: share of the own error by which the weights move, in [0, 1]. 0 is ``Residual``.
        average_every: steps after which all workers' errors are replaced by their mean, by a
            dense all-reduce: then all take a step ahead to the same place. 0: never.

    Raises:
        ValueError: ``alpha`` outside [0, 1], a negative ``average_every``; at fit start, manual
            optimization.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, StepAhead, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), memory=StepAhead(average_every=100))

    Reference:
        Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
        Gradient", AAAI 2021. Shares of a step, as in "SA-PEF", 2026. Momentum is left to the
        optimizer, where the paper has it on each worker.
    """

    alpha: float = 1.0
    average_every: int = 0

    buffers = ("error",)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"StepAhead(alpha={self.alpha!r}): the share of the error must be in [0, 1]; use 1."
            )
        if self.average_every < 0 or self.average_every != int(self.average_every):
            raise ValueError(
                f"StepAhead(average_every={self.average_every!r}): give a whole number of steps, "
                f"or 0 for never."
            )

    @property
    def lookahead(self) -> float:
        """α."""
        return self.alpha

    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        """Average errors where that is due; then as ``Residual``."""
        error = state["error"]
        if self.average_every and bucket.step > 0 and bucket.step % self.average_every == 0:
            (average,) = yield Mean((error.clone(),))
            error.copy_(average)
        yield from exchange(error.add_(bucket.grad))

    @classmethod
    def examples(cls) -> tuple[StepAhead, ...]:
        """One by itself, one that averages."""
        return (cls(), cls(alpha=0.5, average_every=3))
