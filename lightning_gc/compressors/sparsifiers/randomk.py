"""RandomK: send k elements drawn at random, the same ones on every worker."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier


@dataclass(frozen=True)
class RandomK(RandomSparsifier):
    """Send k = density·numel elements drawn without replacement from a seed that workers share.

    ``C(x)_i = x_i`` for i in a random set of size k, else 0. All workers draw the same set from
    (seed, parameter name, step), so no positions are sent and values can be all-reduced: 32 bits a
    sent element. In the paper every worker draws a set of its own, and sends positions too; with as
    many elements a worker, the mean of W workers then has up to W times as many.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import RandomK
        >>> RandomK(density=0.01).traits.linear
        True

    Reference:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, in expectation over the draw."""
        return Contraction(self.count(numel) / max(1, numel))
