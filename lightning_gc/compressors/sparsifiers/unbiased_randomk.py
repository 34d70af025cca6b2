"""UnbiasedRandomK: send k elements drawn at random, scaled so that their mean is unbiased."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import Variance
from lightning_gc.compressors.sparsifiers import random_indices, sparse_payload
from lightning_gc.compressors.sparsifiers.sparse_codec import DENSITY
from lightning_gc.flow import Payload
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class UnbiasedRandomK(Codec):
    """Send k = density·numel elements drawn without replacement, multiplied by numel/k.

    ``C(x)_i = (d/k)·x_i`` for i in a random set of size k, else 0, so that ``E C(x) = x``. All
    workers draw the same set, so no positions are sent: 32 bits a sent element. It needs no error
    feedback, but its variance is d/k − 1: at 1 % a hundred times the gradient's square. ``RandomK``
    does not multiply, and feeds the error back instead.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more variance.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import UnbiasedRandomK
        >>> UnbiasedRandomK(0.25).bound(1000)
        Variance(omega=3.0)

    Reference:
        Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient
        Distributed Optimization", NeurIPS 2018 (with equal probabilities); Horváth and Richtárik,
        "A Better Alternative to Error Feedback", ICLR 2021.
    """

    density: float = 0.1

    traits = replace(
        DENSITY, linear=True, unbiased=True, space=(Range("density", 0.01, 0.5, scale="log"),)
    )

    def __post_init__(self) -> None:
        sparse_payload.check_density("UnbiasedRandomK", self.density)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the drawn elements, multiplied."""
        chosen = random_indices.shared(self.density, buffer.numel(), bucket)
        values = buffer[chosen] * (buffer.numel() / max(1, chosen.numel()))  # (k,)
        buffer[chosen] -= values
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Draw the same set again and add k elements."""
        random_indices.put(
            payload, random_indices.shared(self.density, out.numel(), bucket), out, scale
        )

    def bound(self, numel: int) -> Variance:
        """Return ω = d/k − 1."""
        return Variance(numel / max(1, sparse_payload.count(self.density, numel)) - 1)

    def wire(self, numel: int) -> Wire:
        """Return k values."""
        return (Field("values", torch.float32, sparse_payload.count(self.density, numel)),)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return k."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[UnbiasedRandomK, ...]:
        """One that is sparse."""
        return (cls(0.3),)
