"""ErrorFeedback: add the compression error to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Add the stored error to the gradient before it is compressed.

    ``x_t = decay·e_{t−1} + gain·g_t``, ``e_t = x_t − C(x_t)``. Costs one float32 per parameter and
    worker; errors are float32 for any dtype of the gradient, and unscaled for any loss scale.

    Args:
        decay: weight of the old error, in (0, 1]. 1 loses nothing; lower values damp stale errors
            at the price of a biased sum. Elsewhere called β.
        gain: weight of the new gradient, above 0. Elsewhere called γ. Values other than 1 scale all
            that is sent, like a learning rate.
        lr_aware: keep ``γ_t·e_t``, not ``e_t``, when the learning rate γ changes: the error is
            multiplied by γ_{t−1}/γ_t (a step at γ = 0 does not change it). Errors are then applied
            at the learning rate of the step at which they arose, as in the total-error paper's
            algorithm and wherever a paper feeds back ``γ·g + e``; if off, at the new one, as in
            most code, including that paper's. With a constant learning rate both are the same.
            Meant for SGD: Adam and others divide a step by the scale of what they are given.

    Example:
        >>> from lightning_gc import ErrorFeedback
        >>> ErrorFeedback().conserves
        True

    Reference:
        Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
        ICML 2019.
    """

    decay: float = 1.0
    lr_aware: bool = False
    gain: float = 1.0
    limits = {
        "decay": (
            "(0, 1] the weight of the old error; 1.0 to lose nothing, or NoMemory() to remember "
            "nothing"
        ),
        "gain": "(0, inf) the new gradient's weight",
    }

    buffers = ("error",)

    @property
    def conserves(self) -> bool:
        return self.decay == 1 and self.gain == 1 and not self.lr_aware

    @property
    def rests(self) -> bool:
        return self.gain == 1 and not self.lr_aware

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        yield from exchange.feedback(state["error"], self.decay, self.gain)

    @classmethod
    def examples(cls) -> tuple[ErrorFeedback, ...]:
        return (cls(), cls(decay=0.9, gain=0.5), cls(lr_aware=True))
