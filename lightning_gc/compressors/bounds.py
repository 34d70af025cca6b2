"""Define bounds on the compression error, declared by compressors and checked by contract tests."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Contraction:
    """The bound ``E‖x − C(x)‖² ≤ (1 − delta)·‖x‖²``, with ``0 ≤ delta ≤ 1``."""

    delta: float

    def allowed(self, squared_norm: float) -> float:
        """Return the greatest ``E‖x − C(x)‖²`` for ``‖x‖² = squared_norm``."""
        return (1 - self.delta) * squared_norm


@dataclass(frozen=True)
class AbsoluteError:
    """The bound ``E‖x − C(x)‖² ≤ v²`` for every x."""

    v: float

    def allowed(self, squared_norm: float) -> float:
        return self.v**2


@dataclass(frozen=True)
class Multiple:
    """The bound ``E‖x − C(x)‖² ≤ omega·‖x‖²`` of a possibly biased compressor.

    With ``omega > 1`` it does not imply convergence with error feedback.
    """

    omega: float

    def allowed(self, squared_norm: float) -> float:
        return self.omega * squared_norm


@dataclass(frozen=True)
class Variance(Multiple):
    """The bound ``E C(x) = x`` and ``E‖x − C(x)‖² ≤ omega·‖x‖²``."""


@dataclass(frozen=True)
class Unbounded:
    """No bound: the sent direction has a length unrelated to the gradient's length."""

    def allowed(self, squared_norm: float) -> float:
        return math.inf


Bound = Contraction | AbsoluteError | Multiple | Unbounded
