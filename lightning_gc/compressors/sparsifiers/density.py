"""DensitySparsifier: base of sparsifiers whose level is the share of elements sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lightning_gc.compressors.base import Compressor
from lightning_gc.compressors.traits import Knob, Traits
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class DensitySparsifier(Compressor):
    """Sends k = density·numel elements, at least one; ``density`` is in (0, 1]."""

    density: float = 0.01

    traits = Traits(
        kind="sparsifier",
        knob=Knob("density", low=1e-5, high=1.0),
        space=(Range("density", 1e-4, 0.1, scale="log"),),
    )

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(
                f"{type(self).__name__}(density={self.density!r}): density is the share of "
                f"elements sent and must be in (0, 1]; use 0.01 to send one element in a hundred."
            )

    def count(self, numel: int) -> int:
        """Return k for a tensor of ``numel`` elements."""
        return min(numel, max(1, round(self.density * numel)))

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (cls(0.1), cls(1.0))
