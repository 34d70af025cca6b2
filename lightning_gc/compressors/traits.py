"""Declare a compressor's properties: error bound, linearity, bias, level, hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gc.core import Choice, Range

Kind = Literal["dense", "sparsifier", "quantiser", "low rank"]

LEVEL = "level"
"""Name of the knob in the search space of a wrapper around the compressor with the knob."""


@dataclass(frozen=True)
class Knob:
    """The field that controls the compression level, for controllers, Optuna and the monitor.

    Attributes:
        field: name of the dataclass field.
        low: least sensible value.
        high: greatest sensible value.
        scale: whether steps along the range multiply (``"log"``) or add (``"linear"``).
        more: effect of a higher value: ``"bytes"`` (less compression) or ``"compression"``.
        integer: whether the field takes only whole numbers.
    """

    field: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    more: Literal["bytes", "compression"] = "bytes"
    integer: bool = False

    @property
    def range(self) -> Range:
        """The full range, as an entry of a search space."""
        return Range(self.field, self.low, self.high, self.scale, self.integer)

    @property
    def tightest(self) -> float:
        """The end of the range that compresses most."""
        return self.low if self.more == "bytes" else self.high

    def clamp(self, level: float) -> float:
        """Return the value of the range nearest to ``level``."""
        level = min(max(level, self.low), self.high)
        return round(level) if self.integer else level


@dataclass(frozen=True)
class Waits:
    """How often an operation makes the host wait for the accelerator.

    The host waits for a number computed on the accelerator, such as the count of elements above a
    threshold. It also waits for copies from pageable memory. Meanwhile it cannot start further
    operations of the exchange or the backward pass.

    Attributes:
        least: least number of waits, for a gradient that is not zero.
        most: greatest number of waits; ``math.inf`` without a limit. None means ``least``.
    """

    least: int = 0
    most: float | None = None

    @property
    def limit(self) -> float:
        """The greatest number of waits."""
        return self.least if self.most is None else self.most

    def __str__(self) -> str:
        if self.limit == self.least:
            return str(self.least)
        return f"{self.least} or more" if self.limit == math.inf else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Traits:
    """Properties of a compressor. Wrappers forward the inner compressor's, except ``space``.

    Attributes:
        kind: the family, which determines the default scheme.
        linear: payloads of several workers may be averaged before they are decoded.
        unbiased: the expectation of the decoded payload is the gradient, so error feedback is not
            needed.
        elementwise: elements are independent, so a bucket need not be cut into parameters.
        exact: the decoded payload is the gradient, so the error is always zero.
        conserves: the result is the mean of the sent parts, not a vote, so error feedback loses
            nothing.
        needs_sums: the choice of elements depends on sums over steps and on state of full tensors.
            The memory must have ``accumulates``, and the scheme must not cut tensors into shards.
        reads_model: a tensor's choice depends on the state of all tensors, ``Bucket.before``.
        portable: devices of different models get the same bits from the same payloads. Computations
            repeated on all workers treat elements one by one. They use neither matrix products nor
            sums of many elements nor a generator's numbers.
        default_memory: name of the default memory; None means ``"none"`` for unbiased compressors,
            otherwise ``"error_feedback"``.
        knob: the field that a controller sets, or None.
        space: fields worth tuning, with ranges. A knob missing here is tuned over its own range.
            ``level`` means a knob that is a field of the inner compressor.
    """

    kind: Kind
    linear: bool = False
    unbiased: bool = False
    elementwise: bool = False
    exact: bool = False
    conserves: bool = True
    needs_sums: bool = False
    reads_model: bool = False
    portable: bool = True
    default_memory: str | None = None
    knob: Knob | None = None
    space: tuple[Range | Choice, ...] = ()

    @property
    def level_space(self) -> tuple[Range | Choice, ...]:
        """The knob's entry under the name ``level``, for the space of a wrapper.

        Empty if the space has no entry for the knob. The wrapper then also searches the full range.
        """
        known = {entry.field: entry for entry in self.space}
        entry = None if self.knob is None else known.get(LEVEL, known.get(self.knob.field))
        return () if entry is None else (replace(entry, field=LEVEL),)


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
