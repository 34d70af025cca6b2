"""IndependentRandomK: send k elements at random, drawn by each worker for itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers.independent_sparsifier import SEED, IndependentSparsifier
from lightning_gc.core.wire import Field, Wire


@dataclass(frozen=True)
class IndependentRandomK(IndependentSparsifier):
    """Send k = density·numel elements, which each worker draws without replacement for itself.

    ``C(x)_i = x_i`` for i in the worker's own random set of size k, else 0. Positions follow from a
    seed that is sent along: 32 bits a sent element and 8 bytes. The mean of W workers has up to W
    times as many elements as one has sent, and more of the model moves at a step than by
    ``RandomK``; in return payloads cannot be all-reduced, bytes grow with W, and every worker draws
    the positions of all.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import IndependentRandomK
        >>> IndependentRandomK(0.01).bound(1000)
        Contraction(delta=0.01)

    Reference:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def how_many(self, numel: int, seed: int) -> int:
        """Return k."""
        return self.count(numel)

    def wire(self, numel: int) -> Wire:
        return Field("values", torch.float32, self.count(numel)), SEED

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, in expectation over the draw."""
        return Contraction(self.count(numel) / max(1, numel))

    @classmethod
    def examples(cls) -> tuple[IndependentRandomK, ...]:
        return (cls(0.3), cls(1.0))
