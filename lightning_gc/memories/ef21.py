"""EF21: error feedback that compresses the change of each worker's gradient, or of its average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gc.core import Bucket, Flow
from lightning_gc.memories.base import (
    GradientDifferences,
    GradientExchange,
    State,
    refuse_momentum,
)


@dataclass(frozen=True)
class EF21(GradientDifferences):
    """Compress the gradient minus its estimate, for steady gradients, and apply the new estimate.

    ``c_t = C(g_t − h_{t−1})``, ``h_t = h_{t−1} + c_t``; the mean of h_t over workers is applied. A
    step's error ``g_t − h_t`` is not added to a later gradient: what is applied is an estimate of
    this step's gradient, and catches up with it where it is steady. The paper proves it for any
    contraction, with gradients of all samples, without assuming them bounded or similar on all
    workers; with few samples a step h follows their noise, and ``ErrorFeedback`` averages it.

    With ``momentum=β`` each worker averages its gradients first, and h follows the average:
    ``m_t = (1 − β)·m_{t−1} + β·g_t``, ``c_t = C(m_t − h_{t−1})``, ``h_t = h_{t−1} + c_t``. The
    average has less noise than a gradient of few samples. The first step is sent uncompressed, with
    ``h_0 = m_0 = g_0``. This is the worker's side of EF21-Muon. The optimizer then has no momentum:
    ``torch.optim.Muon(..., momentum=0, nesterov=False)``, or ``AdamW(..., betas=(0.0, 0.999))``.

    Costs three float32 per parameter and worker, with ``momentum`` four. Without it the first
    step's estimate is 0, so with ``TopK`` a parameter is seen bit by bit; the paper sends the first
    gradient whole.

    Args:
        momentum: β, in (0, 1], the weight of the new gradient: 0.1 averages over about ten steps,
            as ``momentum=0.9`` of an optimizer does. 1 averages nothing. None: the formula without
            an average, and no uncompressed step.

    Law:
        ``Σ_i h_i / W``, which all workers keep, is what is applied, up to float32's rounding; and
        ``h_t + (what compression has left of g_t − h_{t−1}) = g_t`` on each worker, with m in the
        place of g if there is momentum.

    Raises:
        ValueError: ``momentum`` outside (0, 1]; at fit start, with ``momentum``, an optimizer that
            has momentum too.

    Example:
        >>> from lightning_gc import EF21, CompressedDDPStrategy, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), memory=EF21(momentum=0.1))

    Reference:
        Richtárik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
        Practically Faster Error Feedback", NeurIPS 2021. Published code of it has the same step.
        Fatkhullin, Tyurin and Richtárik, "Momentum Provably Improves Error Feedback!", NeurIPS
        2023. Gruntkowska, Gaponov, Tovmasyan and Richtárik, "Error Feedback for Muon and Friends",
        arXiv 2510.00643.
    """

    momentum: float | None = None
    limits = {"momentum": "(0, 1] the weight of the new gradient; 0.1, or None for no average"}

    @property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        averaged = () if self.momentum is None else ("average",)
        return (*GradientDifferences.buffers, *averaged)

    @property
    def follows(self) -> float:
        return 1.0

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        if self.momentum is not None:
            refuse_momentum(self, group)

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        if self.momentum is None:
            yield from super().flow(bucket, state, exchange)
            return
        first, average = bucket.step == 0, state["average"]
        weight = 1.0 if first else self.momentum
        target = average.mul(1 - weight).add_(bucket.grad, alpha=weight)
        valid = yield from self.follow(target, state, exchange.dense if first else exchange)
        torch.where(valid, target, average, out=average)

    @classmethod
    def examples(cls) -> tuple[EF21, ...]:
        return (cls(), cls(momentum=0.3))
