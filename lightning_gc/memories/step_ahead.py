"""StepAhead: error feedback, with the gradient taken at weights moved by the worker's error."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow, Mean
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class StepAhead(Memory):
    """Feed errors back, and take each worker's gradient at weights moved ahead by its error.

    ``g_t = ∇f(w_t − α·γ_t·e_{t−1})``, ``x_t = e_{t−1} + g_t``, ``e_t = x_t − C(x_t)``, γ being the
    learning rate. An error is a delayed step; a gradient that ignores it is stale when applied. The
    strategy moves the weights during the forward and backward pass and restores them bit for bit;
    validation, checkpoints and the optimizer never see them moved.

    With ``average_every=n`` all workers' errors are replaced by their mean at the end of every n-th
    step, so that the next forward pass is at the same weights on all of them. 1 is the form with
    the mean error ē in place of e, in which surveys state the method; it makes every step as dense
    as without compression.

    Nothing is lost, as with ``ErrorFeedback``. Costs one float32 per parameter and worker, and
    a copy of the weights while they are moved. Meant for SGD: its step is γ times what is sent.
    Errors are in units of the gradient: right after a change of γ the weights move by the new γ
    times an error that arose at the old one.

    Args:
        alpha: share of the worker's error by which its weights move, in [0, 1]. 0 is
            ``ErrorFeedback``.
        average_every: steps from one mean of the errors to the next, each a dense all-reduce of 4
            bytes per parameter. 0: never, so that each worker moves by its own error alone. A step
            that an fp16 scaler skips takes its mean back too; the next one is n steps later.

    Raises:
        ValueError: ``alpha`` outside [0, 1], a negative ``average_every``; at fit start, manual
            optimization.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, StepAhead, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), memory=StepAhead(average_every=100))

    Reference:
        Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
        Gradient", AAAI 2021. α below 1 is from "SA-PEF", 2026. Momentum is left to the optimizer;
        the paper has it on each worker.
    """

    alpha: float = 1.0
    average_every: int = 0
    limits = {
        "alpha": "[0, 1] the share of the error; 1",
        "average_every": "[0, inf) the number of steps; 0 for never",
    }

    buffers = ("error",)

    @property
    def lookahead(self) -> float:
        return self.alpha

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        error = state["error"].add_(bucket.grad)
        yield from exchange(error)
        # Last in the round, for the next forward pass is to see it.
        if self.average_every and (bucket.step + 1) % self.average_every == 0:
            (average,) = yield Mean((error.clone(),))
            error.copy_(average)

    @classmethod
    def examples(cls) -> tuple[StepAhead, ...]:
        return (cls(average_every=3), cls(alpha=0.5), cls(average_every=1))
