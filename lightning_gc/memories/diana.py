"""DIANA: compress gradient differences by an unbiased quantiser."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.core import Range
from lightning_gc.memories.base import GradientDifferences


@dataclass(frozen=True)
class DIANA(GradientDifferences):
    """Compress the gradient minus an estimate, which slowly follows what is sent.

    ``Δ_t = Q(g_t − h_{t−1})``, ``h_t = h_{t−1} + α·Δ_t``, and the mean over workers of
    ``h_{t−1} + Δ_t`` is applied. For an unbiased Q, such as ``QSGD``, that is unbiased, and its
    variance is the difference's: it vanishes where gradients settle, even if workers' gradients
    do not become zero. Costs three float32 per parameter and worker.

    Args:
        alpha: α, in (0, 1]. Higher follows the gradient faster; 1/(1 + ω) at most in the paper's
            proof, with ω as in the compressor's ``bound``: 0.28 for ``QSGD(4)``.

    Law:
        ``Σ_i h_i / W``, which all workers keep, is the mean of the estimates, up to float32's
        rounding; ``E[applied_t] = mean_i g_t`` for an unbiased compressor.

    Example:
        >>> from lightning_gc import DIANA, QSGD, CompressedDDPStrategy
        >>> strategy = CompressedDDPStrategy(QSGD(4), memory=DIANA(0.25))

    Reference:
        Mishchenko, Gorbunov, Takáč and Richtárik, "Distributed Learning with Compressed Gradient
        Differences", 2019. Its momentum is left to the optimizer here. The default is ours.
    """

    alpha: float = 0.25
    limits = {"alpha": "(0, 1] the share by which estimates move; 0.25, or EF21() for 1"}

    space = (Range("alpha", 0.02, 1.0, scale="log"),)

    @property
    def follows(self) -> float:
        return self.alpha

    @classmethod
    def examples(cls) -> tuple[DIANA, ...]:
        return (cls(), cls(alpha=1.0))
