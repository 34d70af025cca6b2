"""VarianceSparsifier: send the fewest elements for a given variance, at random but unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.bounds import Variance
from lightning_gc.compressors.sparsifiers.magnitude_sampling import MagnitudeSampling, Sums
from lightning_gc.compressors.traits import Knob, Traits, Waits
from lightning_gc.core.search_space import Range


@dataclass(frozen=True)
class VarianceSparsifier(MagnitudeSampling):
    """Send elements with probability ``min(1, |x_i|/m)``, scaled so that the result is unbiased.

    ``C(x)_i = x_i`` if ``|x_i| ≥ m``, else ``m·sign(x_i)`` with probability ``|x_i|/m``, else 0, so
    that ``E C(x) = x``. Of all probabilities with ``E‖C(x)‖² ≤ (1 + ε)·‖x‖²`` these make the number
    sent least, if over the elements below m ``m = (ε·Σ_all x² + Σ x²) / Σ |x|``: the closed form
    (Algorithm 2) with λ = 1/m. The paper finds it by sorting; here m starts from all elements and
    is lowered, in a few passes, until it agrees with the elements below it.

    The knob is ε, not a density as in the paper's greedy Algorithm 3: ε can be guaranteed. Of d
    normal elements ``0.64·d / (1+ε)`` are sent, on heavy tails far fewer. An element sent by chance
    has no value to send: where they are one in a hundred it takes 9.6 bits.

    Args:
        epsilon: ε, the variance allowed in units of ``‖x‖²``, in 1e-4..1e9. Higher means more
            compression.

    Raises:
        ValueError: ``epsilon`` outside 1e-4..1e9.

    Example:
        >>> from lightning_gc import VarianceSparsifier
        >>> VarianceSparsifier(2.0).bound(1000)
        Variance(omega=2.0)

    Reference:
        Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient
        Distributed Optimization", NeurIPS 2018.
    """

    epsilon: float = 1.0

    traits = Traits(
        kind="sparsifier",
        unbiased=True,
        knob=Knob("epsilon", low=0.01, high=1000.0, more="compression"),
        space=(Range("epsilon", 0.1, 100.0, scale="log"),),
    )
    waits = Waits(3, math.inf)  # mostly 3 or 4

    def __post_init__(self) -> None:
        if not 1e-4 <= self.epsilon <= 1e9:
            raise ValueError(
                f"VarianceSparsifier(epsilon={self.epsilon!r}): the variance allowed, in units of "
                f"the squared norm, must be in 1e-4..1e9; use 1.0, say."
            )

    def least(self, every: Sums, reaching: Sums) -> Tensor:
        squares = (1 + self.epsilon) * every.squares - reaching.squares
        return squares / (every.magnitudes - reaching.magnitudes)

    def bound(self, numel: int) -> Variance:
        """Return ω = ε: ``E‖C(x) − x‖² = E‖C(x)‖² − ‖x‖²`` without bias; reached unless x is 0."""
        return Variance(self.epsilon)

    @classmethod
    def examples(cls) -> tuple[VarianceSparsifier, ...]:
        return (cls(0.01), cls(1.0), cls(0.2))
