"""Describe search spaces of hyper-parameters by ``Range`` and ``Choice``."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from lightning_gc.core.refusal import refuse


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included.

    Args:
        field: name of the tuned field or argument.
        low: least value.
        high: greatest value.
        scale: how numbers are drawn: uniformly (``"linear"``) or with a uniform logarithm
            (``"log"``).
        integer: whether only integers are drawn.

    Raises:
        ValueError: the range is empty or infinite, or is logarithmic and starts at or below 0.

    Example:
        >>> from lightning_gc.compressors import Range
        >>> Range("density", 1e-4, 0.1, scale="log").high
        0.1
    """

    field: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "linear"
    integer: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(
                f"{self.field} from {self.low} to {self.high} is not a range; use finite numbers "
                f"with low <= high."
            )
        if self.scale not in ("log", "linear"):
            refuse(self.field, f"scale {self.scale!r}; use 'log' or 'linear'")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"{self.field} from {self.low}: a logarithmic range starts above 0.")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise ValueError(f"{self.field} from {self.low} to {self.high}: use integers.")


@dataclass(frozen=True)
class Choice:
    """One of a few values: numbers, strings, booleans or None.

    Args:
        field: name of the tuned field or argument.
        values: the possible values.

    Raises:
        ValueError: ``values`` is empty, or a value has another type.

    Example:
        >>> from lightning_gc.compressors import Choice
        >>> Choice("norm", ("max", "l2")).values
        ('max', 'l2')
    """

    field: str
    values: tuple[str | float | bool | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            refuse(self.field, "the choice has no values; give at least one")
        for value in self.values:
            if not isinstance(value, str | int | float | None):
                refuse(
                    self.field, f"{value!r} is not a choice; use numbers, strings, booleans or null"
                )


Space = tuple[Range | Choice, ...]
"""A search space: at most one entry per field."""


def merge(space: Space, changes: Space) -> Space:
    """Return ``space`` with ``changes`` added; an entry replaces the entry of the same field."""
    return tuple({entry.field: entry for entry in (*space, *changes)}.values())


def check_field(owner: type, entry: Range | Choice) -> None:
    """Raise ValueError if the dataclass ``owner`` has no field for ``entry``."""
    fields = [f.name for f in dataclasses.fields(owner)]
    if entry.field not in fields:
        has = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
        raise ValueError(f"{owner.__name__} has no field {entry.field!r} to tune; {has}.")
