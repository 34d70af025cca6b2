"""Check the types of numeric fields of frozen configurations (Settings)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

_WHOLE = ("int", "int | None", int, int | None)
_NUMBERS = (*_WHOLE, "float", "float | None", float, float | None)
"""Annotations of the checked fields, as texts and as types."""


class Settings:
    """Check ``float``, ``int`` and optional numeric fields before the subclass's own checks.

    A subclass's ``__post_init__`` compares fields with numbers. A text there would raise a
    ``TypeError`` that does not name the field. An ``int`` may be given as 2.0, but not as 2.5,
    infinity or NaN.

    Raises:
        ValueError: a text in a numeric field, or a fraction in an ``int`` field.
    """

    def __post_init__(self, *init_only: Any) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, whole = getattr(self, field.name), field.type in _WHOLE
            given = f"{type(self).__name__}({field.name}={value!r}): {field.name} is a"
            example = _example(field.default, whole)
            if isinstance(value, str) and field.type in _NUMBERS:
                raise ValueError(
                    f"{given} number; write {_number(value, example)}, without quotes."
                )
            if whole and isinstance(value, float) and not value.is_integer():
                better = math.ceil(value) if math.isfinite(value) else example
                raise ValueError(f"{given} whole number; use {better}.")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own: Callable[..., None] | None = cls.__dict__.get("__post_init__")
        if own is None:
            return

        @functools.wraps(own)
        def check_first(self: Any, *init_only: Any) -> None:
            Settings.__post_init__(self)
            own(self, *init_only)

        cls.__post_init__ = check_first  # type: ignore[method-assign]


def _example(default: Any, whole: bool) -> str:
    """Return a field's default as text, or a typical number if it has no default."""
    known = default is not None and default is not dataclasses.MISSING
    return repr(default) if known else "1" if whole else "0.01"


def _number(text: str, example: str) -> str:
    """Parse a number from a text, such as 0.01 from "1%"; return the example if that fails."""
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        return example
    return f"{value / 100 if share else value:g}"
