"""RandomMask: send the elements under a random mask, the same one on every worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers.position_draws import positions
from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.wire import Field, Wire


@dataclass(frozen=True)
class RandomMask(RandomSparsifier):
    """Send each element with probability ``density``, independently of the others.

    ``C(x)_i = x_i`` with probability ``density``, else 0. All workers draw the same mask from
    (seed, parameter name, step), so no positions are sent and values can be all-reduced: 32 bits a
    sent element. Their number is binomial, and of a small tensor often zero: ``RandomK`` sends
    equally many at every step, at least one.

    Args:
        density: probability of each element, in (0, 1]. Lower means more compression, more error.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import RandomMask
        >>> RandomMask(0.25).bound(1000)
        Contraction(delta=0.25)

    Reference:
        Konečný, McMahan, Yu, Richtárik, Suresh and Bacon, "Federated Learning: Strategies for
        Improving Communication Efficiency", 2016. There every client has a mask of its own and
        sends the seed, and there is no error feedback: ``memory=NoMemory()``.
    """

    def drawn(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the positions under this step's mask, ``(c,)`` int64.

        All masks with c elements are equally likely, so it is enough to draw c, then c positions.
        Tensors of equal size have masks of their own with the same c.
        """
        c = how_many(self.density, numel, bucket)
        return positions(numel, c, bucket.generator_seed(shared=True), bucket.grad.device)

    def bound(self, numel: int) -> Contraction:
        """Return δ = density, in expectation over the draw."""
        return Contraction(self.density)

    def wire(self, numel: int) -> Wire:
        return (Field("values", torch.float32, numel, "step", "binomial number"),)

    @classmethod
    def examples(cls) -> tuple[RandomMask, ...]:
        return (cls(0.3), cls(1.0))


def how_many(density: float, numel: int, bucket: Bucket) -> int:
    """Return how many of ``numel`` elements the mask keeps: binomial, drawn on the host.

    It depends on seed, step and size alone, so payloads of a two-shot scheme's shards are equally
    long.
    """
    alike = replace(bucket, shapes={f"{numel} elements": (numel,)})
    host = torch.Generator().manual_seed(alike.generator_seed(shared=True))
    trials = torch.tensor(numel, dtype=torch.float64, device="cpu")
    return int(torch.binomial(trials, torch.full_like(trials, density), generator=host))
