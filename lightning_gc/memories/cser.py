"""CSER: errors act on each worker's own weights, and are sent uncompressed every N steps."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Choice, Flow
from lightning_gc.memories.base import GradientExchange, Memory, State


@dataclass(frozen=True)
class CSER(Memory):
    """Compress gradients alone, apply what is left on each worker's own weights, and reset errors.

    ``e_t = e_{t−1} + (g_t − C(g_t))`` with ``g_t = ∇f(w_t − γ·e_{t−1})``, and the mean of C(g_t) is
    applied; in every ``every``-th step ``e_{t−1} + g_t`` is sent uncompressed, and ``e_t = 0``. So
    worker i's model is ``w − γ·e``: it has made its full step at once, and all models are equal
    again after a reset. (Under ``Hierarchical`` it is ahead by its share of what its node
    has left, not by what it has left itself.) An error is not compressed a second time, as it is by
    error feedback; between resets it is local training. γ is the learning rate.

    The strategy moves the weights during the forward and backward pass and restores them bit for
    bit; validation, checkpoints and the optimizer see w, which is the mean of all models plus the
    mean of ``γ·e``. Nothing is lost, as with ``ErrorFeedback``. Costs one float32 per parameter and
    worker, a second one while a bucket is exchanged, a copy of the weights while they are moved,
    and a dense all-reduce every ``every`` steps: at 128, as many bytes as a density of about 0.8 %.
    Meant for SGD: its step is γ times what is sent. Errors are in units of the gradient: after a
    change of γ the weights move by the new γ times an error that arose at the old one.

    Differences from the paper: its resets have a second compressor, and are dense only as a special
    case. Its momentum is each worker's; here the optimizer has momentum of the mean.

    Args:
        every: steps between resets, at least 1. Higher means fewer bytes, and models that differ
            more.

    Raises:
        ValueError: ``every`` below 1; at fit start, manual optimization.

    Example:
        >>> from lightning_gc import CSER, CompressedDDPStrategy, RandomK
        >>> strategy = CompressedDDPStrategy(RandomK(0.01), memory=CSER(every=32))

    Reference:
        Xie, Zheng, Koyejo, Gupta, Li and Lin, "CSER: Communication-efficient SGD with Error Reset",
        NeurIPS 2020. Our reading, compared with published code of it.
    """

    every: int = 128
    limits = {"every": "[1, inf) the number of steps"}

    buffers = ("error",)
    space = (Choice("every", (8, 32, 128)),)

    @property
    def lookahead(self) -> float:
        return 1.0

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        error = state["error"]
        if (bucket.step + 1) % self.every == 0:
            yield from exchange.dense(error.add_(bucket.grad))
            return
        before = error.clone()
        yield from exchange(error.copy_(bucket.grad))
        error.add_(before)

    @classmethod
    def examples(cls) -> tuple[CSER, ...]:
        return (cls(every=3),)
