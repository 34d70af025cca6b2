"""IndependentUnbiasedRandomK: send k scaled elements, drawn by each worker for itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.bounds import Variance
from lightning_gc.compressors.sparsifiers.independent_sparsifier import SEED, IndependentSparsifier
from lightning_gc.compressors.sparsifiers.unbiased_randomk import UnbiasedRandomK
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.wire import Field, Wire


@dataclass(frozen=True)
class IndependentUnbiasedRandomK(IndependentSparsifier):
    """Send k = density·numel elements, which each worker draws for itself, multiplied by numel/k.

    ``C(x)_i = (d/k)·x_i`` for i in the worker's own random set of size k, else 0, so that
    ``E C(x) = x``: the papers' form. Where workers' gradients are alike, the variance of the mean
    is that of one worker over W; with the one set of ``UnbiasedRandomK`` it does not fall with W.
    In return payloads cannot be all-reduced, bytes grow with W, and every worker draws the
    positions of all. 32 bits a sent element and 8 bytes, for the seed of the positions. It needs no
    error feedback.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more variance.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import IndependentUnbiasedRandomK
        >>> IndependentUnbiasedRandomK(0.25).bound(1000)
        Variance(omega=3.0)

    Reference:
        Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient
        Distributed Optimization", NeurIPS 2018 (with equal probabilities); Horváth and Richtárik,
        "A Better Alternative to Error Feedback", ICLR 2021.
    """

    density: float = 0.1

    traits = replace(
        IndependentSparsifier.traits, unbiased=True, space=UnbiasedRandomK.traits.space
    )

    def how_many(self, numel: int, seed: int) -> int:
        """Return k."""
        return self.count(numel)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        chosen, seed = self.drawn(buffer, bucket)
        values = buffer[chosen] * (buffer.numel() / max(1, chosen.numel()))  # (k,)
        buffer[chosen] -= values
        return values, seed

    def wire(self, numel: int) -> Wire:
        return Field("values", torch.float32, self.count(numel)), SEED

    def bound(self, numel: int) -> Variance:
        """Return ω = d/k − 1."""
        return Variance(numel / max(1, self.count(numel)) - 1)

    @classmethod
    def examples(cls) -> tuple[IndependentUnbiasedRandomK, ...]:
        return (cls(0.3),)
