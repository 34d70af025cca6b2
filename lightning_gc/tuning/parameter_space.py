"""Search spaces: what a compressor declares, what a user narrows, and how a trial draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import optuna

from lightning_gc.compressors import Choice, Compressor, Range

Space = tuple[Range | Choice, ...]
PREFIX, MEMORY_PREFIX = "compressor.", "memory."


def declared(compressor: type[Compressor]) -> Space:
    """Return what a compressor class says is worth tuning: its ``space``, and its knob anyway.

    Raises:
        ValueError: the declaration names no field, or leaves the knob's range.

    Example:
        >>> from lightning_gc import TopK
        >>> declared(TopK)
        (Range(field='density', low=0.0001, high=0.1, scale='log', integer=False),)
    """
    space, knob = {entry.field: entry for entry in compressor.space}, compressor.knob
    if knob is not None and knob.field not in space:
        space[knob.field] = Range(knob.field, knob.low, knob.high, knob.scale, knob.integer)
    for entry in space.values():
        check(compressor, entry)
    return tuple(space.values())


def check(compressor: type[Compressor], entry: Range | Choice) -> None:
    """Refuse an entry that the compressor has no field for, or that contradicts its knob."""
    check_field(compressor, entry)
    name, knob = compressor.__name__, compressor.knob
    if knob is None or entry.field != knob.field:
        return
    if isinstance(entry, Choice):
        values = [v for v in entry.values if not isinstance(v, int | float) or isinstance(v, bool)]
        if values:
            raise ValueError(f"{name}.{entry.field} is a number, but could become {values[0]!r}.")
        low, high = min(map(float, entry.values)), max(map(float, entry.values))  # type: ignore[arg-type]
    else:
        low, high = entry.low, entry.high
        if knob.integer and not entry.integer:
            raise ValueError(
                f"{name}.{entry.field} takes whole numbers only; add integer: true to its range."
            )
    if low < knob.low or high > knob.high:
        raise ValueError(
            f"{name}.{entry.field} from {low:g} to {high:g} leaves the range of its knob, "
            f"{knob.low:g} to {knob.high:g}; choose within it."
        )


def check_field(owner: type, entry: Range | Choice) -> None:
    """Refuse an entry for which a compressor or memory has no field."""
    fields = [f.name for f in dataclasses.fields(owner)]
    if entry.field not in fields:
        has = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
        raise ValueError(f"{owner.__name__} has no field {entry.field!r} to tune; {has}.")


def parse(name: str, given: Any) -> Range | Choice:
    """Return what a configuration file says about one value.

    ``{low: 1, high: 50}``, with ``scale: log`` or ``integer: true`` if wanted, or a list to choose
    from. Whole numbers alone do not make a range one of whole numbers.

    Raises:
        ValueError: it is neither.

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
                return Range(name, float(given["low"]), float(given["high"]), **rest)
            except TypeError:
                pass  # falls through to the sentence below
    raise ValueError(
        f"{name}: {given!r} is no range. Write {{low: 1, high: 50}}, with scale: log or "
        f"integer: true if wanted, or a list of values."
    )


def parse_all(given: Mapping[str, Any]) -> Space:
    """Return a space written as ``{name: range or list}``."""
    return tuple(parse(name, entry) for name, entry in given.items())


def draw(trial: optuna.trial.BaseTrial, space: Iterable[Range | Choice], prefix: str = "") -> Any:
    """Return ``{field: value}``; the trial knows each value by its prefixed name."""
    return {entry.field: _suggest(trial, prefix + entry.field, entry) for entry in space}


def _suggest(trial: optuna.trial.BaseTrial, name: str, entry: Range | Choice) -> Any:
    if isinstance(entry, Choice):
        return trial.suggest_categorical(name, entry.values)
    log = entry.scale == "log"
    if entry.integer:
        return trial.suggest_int(name, int(entry.low), int(entry.high), log=log)
    return trial.suggest_float(name, entry.low, entry.high, log=log)


def ends(entry: Range | Choice) -> tuple[Any, Any]:
    """Return the first and the last value."""
    if isinstance(entry, Choice):
        return entry.values[0], entry.values[-1]
    return (int(entry.low), int(entry.high)) if entry.integer else (entry.low, entry.high)


def as_json(space: Space) -> dict[str, Any]:
    """Return a space as plain values, for a study to remember and a person to compare."""
    return {
        entry.field: list(entry.values)
        if isinstance(entry, Choice)
        else [entry.low, entry.high, entry.scale] + ["integer"] * entry.integer
        for entry in space
    }


def shared(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not the compressor's: those that all methods have."""
    return {name: value for name, value in params.items() if not name.startswith(PREFIX)}


def own(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compressor's parameters, under their prefixed names."""
    return {name: value for name, value in params.items() if name.startswith(PREFIX)}
