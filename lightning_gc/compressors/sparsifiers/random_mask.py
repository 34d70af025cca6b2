"""RandomMask: send the elements under a random mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from lightning_gc.compressors.base import Codec, Contraction
from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier
from lightning_gc.core import Bucket, Field


@dataclass(frozen=True, repr=False)
class RandomMask(RandomSparsifier):
    """Send each element with probability ``density``, independently of the others.

    ``C(x)_i = x_i`` with probability ``density``, else 0. With ``shared``, all workers draw the
    same mask from (seed, parameter name, step). Then no positions are sent, values are all-reduced,
    and a sent element takes 32 bits. Otherwise each worker draws its own mask and also sends its
    seed, 8 bytes. Lengths then differ between workers and are sent first.

    The number of elements is binomial, and often zero for a small tensor. ``RandomK`` sends the
    same number in every step, at least one.

    Args:
        density: probability of each element, in (0, 1]. Lower means more compression, more error.
        shared: whether all workers draw the same mask.

    Example:
        >>> from lightning_gc import RandomMask
        >>> RandomMask(0.25).bound(1000)
        Contraction(delta=0.25)

    Reference:
        Konečný, McMahan, Yu, Richtárik, Suresh and Bacon, "Federated Learning: Strategies for
        Improving Communication Efficiency", 2016. There each client draws its own mask, and there
        is no error feedback: ``shared=False`` and ``memory=NoMemory()``.
    """

    shared: bool = True
    unbiased = False

    whole = Codec.whole  # lengths vary, so parameters share no payload

    def how_many(self, numel: int, bucket: Bucket) -> int:
        """Return a binomial number, drawn on the host.

        A shared number depends on seed, step and size only, so that the payloads of a two-shot
        scheme's shards have equal lengths.
        """
        if self.shared:
            bucket = replace(bucket, shapes={f"{numel} elements": (numel,)})
        host = torch.Generator().manual_seed(bucket.generator_seed(shared=self.shared))
        trials = torch.tensor(numel, dtype=torch.float64, device="cpu")
        return int(torch.binomial(trials, torch.full_like(trials, self.density), generator=host))

    def values_field(self, numel: int) -> Field:
        return Field(
            "values", torch.float32, numel, "step" if self.shared else "worker", "binomial number"
        )

    def bound(self, numel: int) -> Contraction:
        """Return δ = density, in expectation over the draw."""
        return Contraction(self.density)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (cls(0.3), cls(1.0), cls(0.3, shared=False))
