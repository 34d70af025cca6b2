"""Keyword arguments: misspelt ones are refused where they are given; which are not defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning_gc.compressors import COMPRESSORS, Compressor
from lightning_gc.registry import did_you_mean


def refuse_unknown(
    strategy: type,
    compressor: Compressor | str,
    given: Mapping[str, Any],
    *takes_the_rest: Callable[..., Any],
) -> None:
    """Raise ValueError for an argument that nothing between ``strategy`` and its end takes.

    Args:
        strategy: whose ``__init__``, and those of its bases, hand on what they do not know.
        compressor: as given, whose own fields are told from what is misspelt.
        given: the arguments.
        takes_the_rest: what gets those that no base takes.
    """
    known = [name for each in (*_makers(strategy), *takes_the_rest) for name in _arguments(each)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{strategy.__name__}({name}=...): there is no such argument"
                + (_of_compressor(compressor, name, value) or did_you_mean(name, known))
                + "."
            )


def _of_compressor(compressor: Compressor | str, name: str, value: Any) -> str:
    """Return how to set the compressor's field of this name, if it has one."""
    named = COMPRESSORS.get(compressor) if isinstance(compressor, str) else None
    cls = type(compressor.method) if isinstance(compressor, Compressor) else named
    if cls is None or name not in getattr(cls, "__dataclass_fields__", ()):
        return ""
    return f"; give an instance: {cls.__name__}({name}={value!r})"


def changed(
    strategy: type, given: Mapping[str, Any], *takes_the_rest: Callable[..., Any]
) -> dict[str, Any]:
    """Return the arguments whose value differs from the default: LightningCLI gives them all.

    Args:
        strategy: as for ``refuse_unknown``, like the next two; its own defaults come first.
        given: names of the arguments and their values.
        takes_the_rest: what gets those that no base takes.
    """
    defaults: dict[str, Any] = {}
    for each in reversed((*_makers(strategy), *takes_the_rest)):
        defaults |= {name: argument.default for name, argument in _arguments(each).items()}
    return {
        name: value
        for name, value in given.items()
        if name not in defaults or not _same(value, defaults[name])
    }


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _makers(strategy: type) -> list[Callable[..., Any]]:
    return [vars(cls)["__init__"] for cls in strategy.__mro__[:-1] if "__init__" in vars(cls)]


def _arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without self
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {each.name: each for each in parameters if each.kind not in several}
