"""Parse search spaces from YAML, and let Optuna suggest values from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_gc.core.search_space import Choice, Range, Space

if TYPE_CHECKING:
    import optuna

PREFIX, MEMORY_PREFIX, ROUNDS_PREFIX = "compressor.", "memory.", "rounds."
PREFIXES = (PREFIX, MEMORY_PREFIX, ROUNDS_PREFIX)
"""Prefixes of a method's parameters in a study; parameters without one belong to the model."""


def parse(name: str, given: Any) -> Range | Choice:
    """Return the range or choice that a configuration file gives for one field.

    Write ``{low: 1, high: 50}``, optionally with ``scale: log`` or ``integer: true``, or a list of
    values. Without ``integer`` a range has real numbers, even between whole ones.

    Raises:
        ValueError: it is not a range or a list.

    Example:
        >>> parse("model.dropout", {"low": 0, "high": 0.8})
        Range(field='model.dropout', low=0.0, high=0.8, scale='linear', integer=False)
    """
    if isinstance(given, Range | Choice):
        return dataclasses.replace(given, field=name)
    if isinstance(given, list | tuple):
        return Choice(name, tuple(given))
    if isinstance(given, Mapping):
        rest = {key: value for key, value in given.items() if key not in ("low", "high")}
        if {"low", "high"} <= set(given) and set(rest) <= {"scale", "integer"}:
            try:
                low, high = float(given["low"]), float(given["high"])
            except (TypeError, ValueError):
                pass  # raise the error below
            else:
                return Range(name, low, high, **rest)
    raise ValueError(
        f"{name}: {given!r} is not a range. Write {{low: 1, high: 50}}, optionally with scale: log "
        f"or integer: true, or a list of values."
    )


def parse_all(given: Mapping[str, Any]) -> Space:
    """Return a space written as ``{name: range or list}``."""
    return tuple(parse(name, entry) for name, entry in given.items())


def suggest(trial: optuna.trial.BaseTrial, space: Space, prefix: str = "") -> dict[str, Any]:
    """Return ``{field: value}``; the trial draws each value under ``prefix + field``."""
    return {entry.field: _suggest(trial, prefix + entry.field, entry) for entry in space}


def _suggest(trial: optuna.trial.BaseTrial, name: str, entry: Range | Choice) -> Any:
    if isinstance(entry, Choice):
        return trial.suggest_categorical(name, entry.values)
    log = entry.scale == "log"
    if entry.integer:
        return trial.suggest_int(name, int(entry.low), int(entry.high), log=log)
    return trial.suggest_float(name, entry.low, entry.high, log=log)


def endpoints(space: Space, last: bool = False) -> dict[str, Any]:
    """Return ``{field: first value}``, or the last values if ``last``."""
    found: dict[str, Any] = {}
    for entry in space:
        ends = entry.values if isinstance(entry, Choice) else (entry.low, entry.high)
        value = ends[-1 if last else 0]
        whole = isinstance(entry, Range) and entry.integer
        found[entry.field] = int(value) if whole else value  # type: ignore[arg-type]
    return found


def as_json(space: Space) -> dict[str, Any]:
    """Return a space as plain values, which a study can store."""
    return {
        entry.field: list(entry.values)
        if isinstance(entry, Choice)
        else [entry.low, entry.high, entry.scale] + ["integer"] * entry.integer
        for entry in space
    }
