"""The search space that a compressor class declares, and the check of an entry against its knob."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_gc.compressors.base import Compressor
from lightning_gc.compressors.traits import LEVEL, Traits
from lightning_gc.registry import required_fields
from lightning_gc.search_space import Choice, Range, Space, check_field


def instance(compressor: type[Compressor], fields: Mapping[str, Any]) -> Compressor:
    """Return one with these fields; ``level`` is that of the compressor inside, if it has one."""
    given, at = dict(fields), None
    if LEVEL not in _names(compressor):
        at = given.pop(LEVEL, None)
    found: Compressor = compressor(**given)
    return found if at is None else found.at(at)


def traits_of(compressor: type[Compressor]) -> Traits:
    """Return the traits of a class's default instance, else of its first example."""
    found: object = compressor.traits  # a property, if it depends on fields
    if isinstance(found, Traits):
        return found
    return (compressor.examples()[0] if required_fields(compressor) else compressor()).traits


def declared(compressor: type[Compressor]) -> Space:
    """Return the search space of a compressor class: its ``space``, and its knob in any case.

    Raises:
        ValueError: the declaration names no field, or leaves the knob's range.

    Example:
        >>> from lightning_gc import TopK
        >>> declared(TopK)
        (Range(field='density', low=0.0001, high=0.1, scale='log', integer=False),)
    """
    traits = traits_of(compressor)
    space, knob = traits.space, traits.knob
    fields = _names(compressor) - {entry.field for entry in space}
    if knob is not None and knob.field in fields:  # else it is an inner compressor's
        space += (knob.range,)
    for entry in space:
        check_entry(compressor, entry)
    return space


def check_entry(compressor: type[Compressor], entry: Range | Choice) -> None:
    """Refuse an entry that the compressor has no field for, or that contradicts its knob."""
    name, knob = compressor.__name__, traits_of(compressor).knob
    known_as = None if knob is None else knob.field
    if knob is not None and knob.field not in _names(compressor):
        if entry.field == knob.field:
            raise ValueError(f"{name} has {knob.field} of the compressor inside; call it level.")
        known_as = LEVEL
    if not (known_as == LEVEL == entry.field):
        check_field(compressor, entry)
    if knob is None or entry.field != known_as:
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


def _names(compressor: type[Compressor]) -> set[str]:
    return {field.name for field in dataclasses.fields(compressor)}  # type: ignore[arg-type]
