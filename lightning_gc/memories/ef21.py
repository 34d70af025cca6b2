"""EF21: error feedback that compresses the change of each worker's gradient."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.memories.base import GradientDifferences


@dataclass(frozen=True)
class EF21(GradientDifferences):
    """Compress the gradient minus its estimate, and apply the new estimate.

    ``c_t = C(g_t − h_{t−1})``, ``h_t = h_{t−1} + c_t``; the mean of h_t over workers is applied. A
    step's error ``g_t − h_t`` is not added to a later gradient: what is applied is an estimate of
    this step's gradient, and catches up with it where it is steady. The paper proves it for any
    contraction, with gradients of all samples, without assuming them bounded or similar on all
    workers; with few samples a step h follows their noise, and ``ErrorFeedback`` averages it.

    Costs three float32 per parameter and worker. The first step's estimate is 0, so with ``TopK`` a
    parameter is seen bit by bit; the paper sends the first gradient whole.

    Law:
        ``Σ_i h_i / W``, which all workers keep, is what is applied, up to float32's rounding; and
        ``h_t + (what compression has left of g_t − h_{t−1}) = g_t`` on each worker.

    Example:
        >>> from lightning_gc import EF21, CompressedDDPStrategy, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), memory=EF21())

    Reference:
        Richtárik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
        Practically Faster Error Feedback", NeurIPS 2021. Published code of it has the same step.
    """

    @property
    def follows(self) -> float:
        return 1.0
