"""What there is to choose from, as tables to print."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from lightning_gc import controllers
from lightning_gc.compressors import COMPRESSORS, Choice, Knob, Range
from lightning_gc.controllers import Controller
from lightning_gc.memories import MEMORIES
from lightning_gc.registry import concrete
from lightning_gc.schemes import SCHEMES
from lightning_gc.tuning.space import declared


def catalogue() -> list[Table]:
    """Return a table each of compressors, memories, schemes and controllers."""
    compressors = Table("name", "class", "kind", "knob", "tuned", "what", title="Compressors")
    for name, cls in sorted(COMPRESSORS.items()):
        tuned = "\n".join(map(_range, declared(cls)))
        knob = "" if cls.knob is None else _knob(cls.knob)
        compressors.add_row(name, cls.__name__, cls.kind, knob, tuned, _first_line(cls))
    return [
        compressors,
        _plain("Memories", MEMORIES),
        _plain("Schemes", SCHEMES),
        _plain("Controllers", concrete(vars(controllers), Controller)),
    ]


def _plain(title: str, known: Mapping[str, type[Any]]) -> Table:
    table = Table("name", "class", "fields", "what", title=title)
    for name, cls in sorted(known.items()):
        fields = "\n".join(_field(field) for field in dataclasses.fields(cls))
        table.add_row(name, cls.__name__, fields, _first_line(cls))
    return table


def _knob(knob: Knob) -> str:
    whole = ", whole numbers" if knob.integer else ""
    return f"{knob.field}: {knob.low:g} to {knob.high:g}, {knob.scale}{whole}\nmore: {knob.more}"


def _range(entry: Range | Choice) -> str:
    if isinstance(entry, Choice):
        return f"{entry.field}: {', '.join(map(str, entry.values))}"
    return f"{entry.field}: {entry.low:g} to {entry.high:g}, {entry.scale}"


def _field(field: dataclasses.Field[Any]) -> str:
    missing = field.default is dataclasses.MISSING
    return field.name if missing else f"{field.name} = {field.default!r}"


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "")
