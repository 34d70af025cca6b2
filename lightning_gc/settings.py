"""Settings: base of frozen configurations, which refuses a text where a number belongs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


class Settings:
    """Base of dataclasses; fields declared as ``float`` or ``int`` are checked before all else.

    A subclass's ``__post_init__`` compares them with numbers, which with a text is a ``TypeError``
    that says nothing to a user.
    """

    def __post_init__(self, *init_only: Any) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, str) and field.type in ("float", "int", float, int):
                raise ValueError(
                    f"{type(self).__name__}({field.name}={value!r}): {field.name} is a number; "
                    f"write {_number(value, field.default)}, without quotes."
                )

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


def _number(text: str, default: Any) -> str:
    """Return the number that a text means, such as 0.01 for 1%, else an example."""
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        return "0.01" if default is dataclasses.MISSING else repr(default)
    return f"{value / 100 if share else value:g}"
