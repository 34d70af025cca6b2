"""SAEF: step-ahead error feedback with the mean error and momentum on each worker."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Bucket, Flow, Mean, Range
from lightning_gc.memories.base import GradientExchange, OwnMomentum, State


@dataclass(frozen=True)
class SAEF(OwnMomentum):
    """Step ahead by the mean error of all workers, and compress momentum together with it.

    ``ē_t = mean_i e_t``, ``g_t = ∇f(w_t − γ·ē_t)``, ``m_t = μ·m_{t−1} + g_t``, ``Δ_t = ē_t + m_t``,
    ``e_{t+1} = Δ_t − Q(Δ_t)``, and the mean of ``Q(Δ_t)`` is applied. γ is the learning rate: this
    is the survey's statement (its eq. 24 to 30), with errors in units of the gradient and the sign
    of a descent. Its mean error makes every step as dense as without compression: 4 bytes a
    parameter in an all-reduce, which the survey does not count. ``StepAhead`` has other momentum,
    and averages seldom or never.

    Use plain SGD: momentum in the optimizer would be added to this one. Costs two float32 per
    parameter and worker, and a copy of the weights while they are moved.

    Args:
        momentum: μ, in [0, 1). Higher averages over more steps.

    Law:
        Nothing is lost of the momenta: ``Σ mean_t`` plus the mean error is the sum over steps of
        the mean m_t.

    Raises:
        ValueError: ``momentum`` outside [0, 1); at fit start, an optimizer with momentum, or manual
            optimization.

    Example:
        >>> from lightning_gc import SAEF, CompressedDDPStrategy, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), memory=SAEF(0.9))

    Reference:
        Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
        Gradient", AAAI 2021, as stated in Ming et al., "Gradient Compression Techniques in
        Distributed DNNs Training Systems: A Survey and Outlook".
    """

    buffers = ("error", "momentum")
    unused = "skip"  # else a worker without a gradient would miss the mean of the errors
    space = (Range("momentum", 0.1, 0.9),)

    @property
    def lookahead(self) -> float:
        return 1.0

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        momentum = state["momentum"].mul_(self.momentum).add_(bucket.grad)
        error = state["error"].add_(momentum)
        yield from exchange(error)
        # Last in the round, for the next forward pass is to see it.
        (average,) = yield Mean((error.clone(),))
        error.copy_(average)
