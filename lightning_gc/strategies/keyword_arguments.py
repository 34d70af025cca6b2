"""Keyword arguments: refuse a misspelt one where it is given, not where it arrives at last."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
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
    makers = [vars(cls)["__init__"] for cls in strategy.__mro__[:-1] if "__init__" in vars(cls)]
    known = [name for each in (*makers, *takes_the_rest) for name in _arguments(each)]
    for name in given:
        if name not in known:
            raise ValueError(
                f"{strategy.__name__}({name}=...): there is no such argument"
                f"{did_you_mean(name, known)}."
            )


def _arguments(function: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without self
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.kind not in several]
