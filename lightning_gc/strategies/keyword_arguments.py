"""Keyword arguments: misspelt ones are refused where they are given; which are not defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_gc.registry import did_you_mean


def refuse_unknown(
    strategy: type, given: Iterable[str], *takes_the_rest: Callable[..., Any]
) -> None:
    """Raise ValueError for an argument that nothing between ``strategy`` and its end takes.

    Args:
        strategy: whose ``__init__``, and those of its bases, hand on what they do not know.
        given: names of the arguments.
        takes_the_rest: what gets those that no base takes.
    """
    known = [name for each in (*_makers(strategy), *takes_the_rest) for name in _arguments(each)]
    for name in given:
        if name not in known:
            raise ValueError(
                f"{strategy.__name__}({name}=...): there is no such argument"
                f"{did_you_mean(name, known)}."
            )


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
