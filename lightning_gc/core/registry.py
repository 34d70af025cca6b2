"""Compute registries from namespaces: find classes by name and make instances of them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def export(namespace: dict[str, Any], *more: str) -> None:
    """Set ``__all__`` of a package to the public classes and functions in its namespace.

    Static tools read a computed ``__all__`` as empty, so they must not see it. They find exports by
    ``from x import Y as Y``.

    Args:
        namespace: the package's ``globals()``.
        more: names of constants to export.
    """
    kinds = (type, FunctionType)
    found = [n for n, v in namespace.items() if isinstance(v, kinds) and not n.startswith("_")]
    namespace["__all__"] = sorted([*found, *more])
    refuse_misspelt(namespace)


def refuse_misspelt(namespace: dict[str, Any]) -> None:
    """Let a package name the closest of its names if one does not exist.

    Args:
        namespace: the package's ``globals()``, with ``__all__``.
    """
    package = namespace["__name__"]

    def missing(name: str) -> NoReturn:
        # Python looks for a submodule after an AttributeError only.
        if name.startswith("_") or find_spec(f"{package}.{name}"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        refuse_import(package, name, {each: f"{package}.{each}" for each in namespace["__all__"]})

    namespace["__getattr__"] = missing


def refuse_import(package: str, name: str, known: Mapping[str, str]) -> NoReturn:
    """Refuse a name that a package's ``__getattr__`` does not find; say what is near enough.

    Args:
        package: the package's name.
        name: that is asked for.
        known: ``{name: dotted path}`` of names that may be meant.

    Raises:
        AttributeError: always.
        ImportError: the same for ``from package import name``, where Python hides the other error.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")  # ``__getattr__`` lies between
    said = f"module {package!r} has no attribute {name!r}{_meant(name, known)}"
    if asking == "importlib._bootstrap":
        raise ImportError(said, name=package)
    raise AttributeError(said, name=name)


def _meant(name: str, known: Mapping[str, str]) -> str:
    """Return how to import the closest known name, or an empty string."""
    found = name if name in known else closest(name, known)
    if found is None:
        return ""
    home, _, now = known[found].rpartition(".")
    return f"; did you mean `from {home} import {now}`?"


def subclasses(namespace: Mapping[str, Any], base: type[T]) -> dict[str, type[T]]:
    """Return ``{name: class}`` of the concrete subclasses of ``base`` in a namespace.

    A class is named after its file: ``HardThreshold`` in ``hard_threshold.py`` is
    ``"hard_threshold"``. A preset in the file of its family has its name in ``registry_name``.
    """
    classes = [v for v in namespace.values() if inspect.isclass(v) and issubclass(v, base)]
    classes = sorted(classes, key=lambda cls: cls.__name__)
    return {_registry_name(cls): cls for cls in classes if not inspect.isabstract(cls)}


def _registry_name(cls: type) -> str:
    return str(vars(cls).get("registry_name", cls.__module__.rpartition(".")[2]))


def concrete(namespace: Mapping[str, Any], base: type[T]) -> dict[str, type[T]]:
    """Return the ``subclasses`` that can be made by name, because all fields have defaults."""
    found = subclasses(namespace, base)
    return {name: cls for name, cls in found.items() if not required_fields(cls)}


def required_fields(cls: type) -> set[str]:
    """Return the names of a dataclass's fields that have no default."""
    missing, fields = dataclasses.MISSING, dataclasses.fields(cls)
    return {f.name for f in fields if f.default is missing and f.default_factory is missing}


def given_fields(value: Any) -> dict[str, Any]:
    """Return ``{name: value}`` of a dataclass's non-default fields, ``{}`` for other objects."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {
        f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != default_of(f)
    }


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a dataclass field's default, or ``dataclasses.MISSING``."""
    missing, factory = dataclasses.MISSING, field.default_factory
    return field.default if factory is missing else factory()


def path_of(cls: type) -> str:
    """Return the dotted path by which users import a class.

    Example:
        >>> from lightning_gc import TopK
        >>> path_of(TopK)
        'lightning_gc.compressors.TopK'
    """
    top, _, rest = cls.__module__.partition(".")
    if top != __name__.partition(".")[0]:
        return f"{cls.__module__}.{cls.__qualname__}"
    return f"{top}.{rest.partition('.')[0]}.{cls.__qualname__}"


def make(kind: str, value: T | str, known: Mapping[str, type[T]], base: type[T]) -> T:
    """Return ``value``, or a default instance of the class named ``value``.

    Raises:
        ValueError: ``value`` is neither a known name nor an instance of ``base``.
    """
    if isinstance(value, base):
        return value
    if isinstance(value, str) and value in known:
        return known[value]()
    if isinstance(value, type) and issubclass(value, base):
        raise ValueError(f"{value.__name__} is a class; give an instance of it: {_call(value)}.")
    close = closest(value, known) if isinstance(value, str) else None
    if close is not None:
        that_name = "" if required_fields(known[close]) else "that name, or "
        raise ValueError(
            f"{value!r} is not a {kind}{did_you_mean(value, known)}; give {that_name}an instance: "
            f"{_call(known[close])}."
        )
    example = next(filter(None, map(known.get, _TYPICAL)), next(iter(known.values())))
    given = (
        repr(value)
        if isinstance(value, str | int | float | None)
        else f"an object of {type(value).__name__}"
    )
    names = kind[:-1] + "ies" if kind.endswith("y") else f"{kind}s"
    raise ValueError(
        f"{given} is not a {kind}; give an instance, such as {_call(example)}, or a name. "
        f"lightning-gc list {names} prints all names."
    )


def did_you_mean(value: object, known: Collection[str]) -> str:
    """Return " (did you mean '...'?)" with the closest known name, or an empty string."""
    close = closest(value, known)
    return "" if close is None else f" (did you mean {close!r}?)"


_MEANT = {
    "ef": "error_feedback",
    "fraction": "density",
    "h": "every",
    "k": "density",
    "ratio": "density",
    "residual": "error_feedback",
    "residuals": "error_feedback",
}
"""Names used in the literature -> our names, where the spelling is too different to match."""


_TYPICAL = ("qsgd", "error_feedback", "all_gather", "fixed")
"""Names of examples for those who have none in mind: what one may begin with."""


def closest(value: object, known: Collection[str]) -> str | None:
    """Return the known name closest to ``value``, such as a class name or a misspelt name."""
    plain = {_plain(name): name for name in known}
    asked = _plain(str(value).partition("(")[0])
    if _MEANT.get(asked) in known:
        return _MEANT[asked]
    close = difflib.get_close_matches(asked, plain, n=1)
    return plain[close[0]] if close else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _call(cls: type) -> str:
    """Return a constructor call as text, such as ``"TopK(density=...)"``, with required fields."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    needed = required_fields(cls) if fields else set()
    return f"{cls.__name__}({', '.join(f'{f.name}=...' for f in fields if f.name in needed)})"
