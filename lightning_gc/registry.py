"""Names computed from what is there: a class is listed because its package imports it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def export(namespace: dict[str, Any], *more: str) -> None:
    """Set ``__all__`` of a package to the public classes and functions in its namespace.

    Static tools must not see the assignment: they would read a computed ``__all__`` as an empty
    one. Without it they go by ``from x import Y as Y``, which says the same.

    Args:
        namespace: the package's ``globals()``.
        more: names that the package resolves lazily.
    """
    found = (
        name
        for name, value in namespace.items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
    )
    namespace["__all__"] = sorted([*found, *more])


def concrete(namespace: Mapping[str, Any], base: type[T], *excluded: type) -> dict[str, type[T]]:
    """Return ``{name: class}`` of the usable subclasses of ``base`` in a package's namespace.

    The name is that of the file that holds the class: ``hard_threshold.py`` -> ``HardThreshold``.
    """
    classes = (v for v in namespace.values() if inspect.isclass(v) and issubclass(v, base))
    return {
        cls.__module__.rpartition(".")[2]: cls
        for cls in sorted(classes, key=lambda cls: cls.__name__)
        if not inspect.isabstract(cls) and not issubclass(cls, excluded)
    }


def make(kind: str, value: T | str, known: Mapping[str, type[T]], base: type[T]) -> T:
    """Return ``value``, or the default instance of the class that it names.

    Raises:
        ValueError: an unknown name, or neither a name nor an instance of ``base``.
    """
    if isinstance(value, base):
        return value
    if isinstance(value, str) and value in known:
        return known[value]()
    choices = ", ".join(f"{name!r}" for name in sorted(known))
    raise ValueError(
        f"{value!r} is not a {kind}; give an instance, such as "
        f"{next(iter(known.values())).__name__}(), or one of the names {choices}."
    )
