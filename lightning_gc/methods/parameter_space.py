"""Read declared search spaces, parse them from YAML, and let Optuna suggest values from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_gc.core import Choice, Range, Space
from lightning_gc.core.refusal import refuse
from lightning_gc.core.search_space import check_field

if TYPE_CHECKING:
    import optuna
from lightning_gc.compressors.base import LEVEL, Compressor, Traits, has_knob_inside
from lightning_gc.core.registry import required_fields

PREFIX, MEMORY_PREFIX, ROUNDS_PREFIX = "compressor.", "memory.", "rounds."
PREFIXES = (PREFIX, MEMORY_PREFIX, ROUNDS_PREFIX)
"""Prefixes of a method's parameters in a study; parameters without one belong to the model."""


def parse(name: str, given: Any) -> Range | Choice:
    """Return the range or choice that a configuration file gives for one field.

    Write ``{low: 1, high: 50}``, optionally with ``scale: log`` or ``integer: true``, or a list of
    values. Without ``integer`` a range has real numbers, even if its ends are integers.

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


def traits_of(compressor: type[Compressor]) -> Traits:
    """Return the traits of a class's default instance, else of its first example."""
    found: object = compressor.traits  # a property, if it depends on fields
    if isinstance(found, Traits):
        return found
    return (compressor.examples()[0] if required_fields(compressor) else compressor()).traits


def knob_name(compressor: type[Compressor]) -> str | None:
    """Return the knob's name in a study: its field, or ``level`` if a wrapped compressor has it.

    Raises:
        ValueError: the class has a field ``level`` that is not the knob.
    """
    knob = traits_of(compressor).knob
    if knob is None or knob.field == LEVEL or not has_knob_inside(compressor):
        return None if knob is None else knob.field
    if LEVEL in field_names(compressor):
        refuse(
            f"{compressor.__name__} has a field {LEVEL}, but its knob is {knob.field}. Rename the "
            "field, or make it the knob"
        )
    return LEVEL


def field_names(compressor: type[Compressor]) -> set[str]:
    """Return the names of a compressor's fields."""
    return {field.name for field in dataclasses.fields(compressor)}  # type: ignore[arg-type]


def declared(compressor: type[Compressor]) -> Space:
    """Return the search space of a compressor class: its ``traits.space`` and always its knob.

    Raises:
        ValueError: an entry names an unknown field, or leaves the knob's range.

    Example:
        >>> from lightning_gc import TopK
        >>> declared(TopK)
        (Range(field='density', low=0.0001, high=0.1, scale='log', integer=False),)
    """
    traits, name = traits_of(compressor), knob_name(compressor)
    space, knob = traits.space, traits.knob
    if knob is not None and name is not None:
        # A space that is inherited from the compressor inside may use the knob's other name.
        other = {LEVEL, knob.field} - field_names(compressor)
        space = tuple(_renamed(entry, name) if entry.field in other else entry for entry in space)
        if name not in {entry.field for entry in space}:
            space += (_renamed(knob.range, name),)
    for entry in space:
        check_entry(compressor, entry)
    return space


def check_entry(compressor: type[Compressor], entry: Range | Choice) -> None:
    """Raise ValueError if an entry is not a field or ``level``, or contradicts the knob."""
    name, knob = compressor.__name__, traits_of(compressor).knob
    known_as = knob_name(compressor)
    inside = {LEVEL} if known_as == LEVEL else set()
    if entry.field not in field_names(compressor) | inside:
        if inside and knob is not None and entry.field == knob.field:
            refuse(name, f"{knob.field} is a field of the compressor inside. Call it {LEVEL}")
        check_field(compressor, entry)
    if knob is None or entry.field != known_as:
        return
    if isinstance(entry, Choice):
        for value in entry.values:
            if not isinstance(value, int | float) or isinstance(value, bool):
                refuse(f"{name}.{entry.field} is a number, but could become {value!r}")
            if knob.integer and not float(value).is_integer():
                refuse(f"{name}.{entry.field} takes integers only, not {value!r}")
        low, high = min(map(float, entry.values)), max(map(float, entry.values))  # type: ignore[arg-type]
    else:
        low, high = entry.low, entry.high
        if knob.integer and not entry.integer:
            refuse(f"{name}.{entry.field} takes integers only. Add integer: true to its range")
    if low < knob.low or high > knob.high:
        refuse(
            f"{name}.{entry.field} from {low:g} to {high:g} leaves the range of its knob, "
            f"{knob.low:g} to {knob.high:g}. Choose within it"
        )


def _renamed(entry: Range | Choice, field: str) -> Range | Choice:
    return dataclasses.replace(entry, field=field)
