"""Settings: base of frozen configurations, which refuses a text or a fraction in a wrong place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

_WHOLE = ("int", "int | None", int, int | None)
_NUMBERS = (*_WHOLE, "float", "float | None", float, float | None)
"""Types of the fields that are checked, as they are declared."""


class Settings:
    """Base of dataclasses; fields declared as ``float`` or ``int`` are checked before all else.

    So are those that may also be None. A subclass's ``__post_init__`` compares them with numbers,
    which with a text is a ``TypeError`` that says nothing to a user. An ``int`` may be given as
    2.0, but not as 2.5, infinity or NaN, which comparisons let through.
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
    """Return a field's default if that is a number, else a number that it might be."""
    known = default is not None and default is not dataclasses.MISSING
    return repr(default) if known else "1" if whole else "0.01"


def _number(text: str, example: str) -> str:
    """Return the number that a text means, such as 0.01 for 1%, else the example."""
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        return example
    return f"{value / 100 if share else value:g}"
