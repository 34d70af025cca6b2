"""UnbiasedRandomK: send k elements drawn at random, scaled so that their mean is unbiased."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightning_gc.compressors.bounds import Variance
from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.search_space import Range


@dataclass(frozen=True)
class UnbiasedRandomK(RandomSparsifier):
    """Send k = density·numel elements drawn without replacement, multiplied by numel/k.

    ``C(x)_i = (d/k)·x_i`` for i in a random set of size k, else 0, so that ``E C(x) = x``. All
    workers draw the same set, so no positions are sent: 32 bits a sent element. It needs no error
    feedback, but its variance is large: at 1 % a hundred times the gradient's square, and as the
    set is common, the mean of many workers has no less. In the papers each worker draws its own:
    ``IndependentUnbiasedRandomK``.

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
        RandomSparsifier.traits, unbiased=True, space=(Range("density", 0.01, 0.5, scale="log"),)
    )

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        chosen = self.drawn_once(buffer.numel(), bucket)
        values = buffer[chosen] * (buffer.numel() / max(1, chosen.numel()))  # (k,)
        buffer[chosen] -= values
        return (values,)

    def bound(self, numel: int) -> Variance:
        """Return ω = d/k − 1."""
        return Variance(numel / max(1, self.count(numel)) - 1)

    @classmethod
    def examples(cls) -> tuple[UnbiasedRandomK, ...]:
        return (cls(0.3),)
