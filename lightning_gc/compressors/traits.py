"""Properties that a compressor declares: linearity, bias, its level and its hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gc.core.search_space import Choice, Range

Kind = Literal["dense", "sparsifier", "quantiser", "low rank"]

LEVEL = "level"
"""What the knob is called in the search space of a compressor that holds the knob's owner."""


@dataclass(frozen=True)
class Knob:
    """The one field that a controller turns, Optuna samples and the monitor names.

    Attributes:
        field: name of the dataclass field.
        low: least sensible value.
        high: greatest sensible value.
        scale: whether steps along the range multiply (``"log"``) or add (``"linear"``).
        more: what a higher value means: ``"bytes"`` (less compression) or ``"compression"``.
        integer: whether only whole numbers make sense.
    """

    field: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    more: Literal["bytes", "compression"] = "bytes"
    integer: bool = False

    @property
    def range(self) -> Range:
        """The whole range, as a search space's entry."""
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
    """How often something makes the host wait for an accelerator, on which it computes.

    Until the host goes on, it starts no further operations, and the backward pass no further ones
    of the exchange. It waits where it needs a number that the accelerator computes, such as that of
    elements that reach a threshold, and for copies from ordinary memory.

    Attributes:
        least: how often at least, for a gradient that is not zero.
        most: how often at most; ``math.inf`` where there is no limit. None: as often as ``least``.
    """

    least: int = 0
    most: float | None = None

    @property
    def limit(self) -> float:
        """How often at most."""
        return self.least if self.most is None else self.most

    def __str__(self) -> str:
        if self.limit == self.least:
            return str(self.least)
        return f"{self.least} or more" if self.limit == math.inf else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Traits:
    """What a compressor is. Wrappers hand on those of the compressor inside, all but ``space``.

    Attributes:
        kind: the family, which decides on the default scheme.
        linear: payloads of several workers may be averaged before they are decoded.
        unbiased: the expectation of what is sent is the gradient; error feedback is not needed.
        elementwise: elements are independent, so a bucket need not be cut into parameters.
        exact: what is sent is the gradient itself: the error is always zero.
        conserves: the result is the mean of what workers sent, not a vote: with error feedback
            nothing is lost.
        needs_sums: it chooses by what has added up over steps, and by state of whole tensors; so it
            takes a memory that ``accumulates``, and no scheme that cuts tensors into shards.
        portable: devices of different models get the same bits of the same payloads: what workers
            compute alike treats elements one by one, without matrix products, sums of many
            elements or a generator's numbers.
        default_memory: name of the memory if none is chosen; None means ``"none"`` for unbiased
            compressors, else ``"residual"``.
        knob: the one field that a controller turns, or None.
        space: fields worth tuning, with ranges. A knob that is not among them has its own range.
            ``level`` is the knob, where that is a field of the compressor inside.
    """

    kind: Kind
    linear: bool = False
    unbiased: bool = False
    elementwise: bool = False
    exact: bool = False
    conserves: bool = True
    needs_sums: bool = False
    portable: bool = True
    default_memory: str | None = None
    knob: Knob | None = None
    space: tuple[Range | Choice, ...] = ()

    @property
    def level_space(self) -> tuple[Range | Choice, ...]:
        """The knob's entry, called ``level``: part of the space of what holds this compressor.

        Empty if the space has no entry of the knob; then its whole range is searched there, too.
        """
        known = {entry.field: entry for entry in self.space}
        entry = None if self.knob is None else known.get(LEVEL, known.get(self.knob.field))
        return () if entry is None else (replace(entry, field=LEVEL),)
