"""IndependentRandomMask: send the elements under a random mask of each worker's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers.independent_sparsifier import SEED, IndependentSparsifier
from lightning_gc.core.wire import Field, Wire


@dataclass(frozen=True)
class IndependentRandomMask(IndependentSparsifier):
    """Send each element with probability ``density``, by a mask of each worker's own.

    ``C(x)_i = x_i`` with probability ``density``, independently for elements and workers, else 0.
    The mask follows from a seed that is sent along: 32 bits a sent element and 8 bytes. The number
    of elements is binomial, and differs between workers, so lengths are sent ahead. In
    ``RandomMask`` all workers have the same mask, and values are all-reduced.

    Args:
        density: probability of each element, in (0, 1]. Lower means more compression, more error.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, IndependentRandomMask, NoMemory
        >>> paper = CompressedDDPStrategy(IndependentRandomMask(0.25), memory=NoMemory())

    Reference:
        Konečný, McMahan, Yu, Richtárik, Suresh and Bacon, "Federated Learning: Strategies for
        Improving Communication Efficiency", 2016, without error feedback: ``memory=NoMemory()``.
    """

    def how_many(self, numel: int, seed: int) -> int:
        """Return a binomial number, drawn on the host."""
        host = torch.Generator().manual_seed(seed)
        trials = torch.tensor(numel, dtype=torch.float64, device="cpu")
        return int(torch.binomial(trials, torch.full_like(trials, self.density), generator=host))

    def wire(self, numel: int) -> Wire:
        return Field("values", torch.float32, numel, "worker", "binomial number"), SEED

    def bound(self, numel: int) -> Contraction:
        """Return δ = density, in expectation over the draw."""
        return Contraction(self.density)

    @classmethod
    def examples(cls) -> tuple[IndependentRandomMask, ...]:
        return (cls(0.3), cls(1.0))
