"""What there is to choose from, as rows: read from declarations, and wire bits from a payload."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_gc import controllers
from lightning_gc.catalogue.citations import cited
from lightning_gc.compressors import (
    COMPRESSORS,
    AbsoluteError,
    Choice,
    Compressor,
    Contraction,
    Knob,
    Multiple,
    Range,
    Unbounded,
    Variance,
)
from lightning_gc.controllers import Controller
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.registry import concrete
from lightning_gc.schemes import SCHEMES, Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.tuning.parameter_space import declared

SIDE = 512
"""Rows and columns of the matrix that bounds and wire bits are about."""

SPREAD = 0.004
"""Standard deviation of its normal elements: 1.2 % of them reach a threshold of 0.01."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What there is to say of one class.

    Attributes:
        name: in the registry: that of the file.
        cls: the class.
        cells: heading -> text, in lines that may be joined by spaces.
    """

    name: str
    cls: type[Any]
    cells: Mapping[str, str]

    @property
    def what(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.cls) or "").partition("\n")[0]


def compressor_row(name: str, cls: type[Compressor]) -> Row:
    """Return what the default instance declares, and what it sends."""
    compressor = cls()
    _, memory, scheme = combine(compressor)
    cells = {
        "kind": ",\n".join(filter(None, [compressor.kind, ", ".join(traits(compressor))])),
        "bits": f"{wire_bits(compressor):.3g}",
        "error bound": bound(compressor, SIDE**2),
        "knob": "none" if compressor.knob is None else _knob(compressor.knob),
        "tuned": ",\n".join(map(_range, declared(cls))),
        "memory": written(memory),
        "scheme": written(scheme),
        "reference": cited(inspect.getdoc(cls) or ""),
    }
    return Row(name, cls, cells)


def traits(compressor: Compressor) -> list[str]:
    """Return what a compressor says of itself, in words."""
    said = {
        "linear": compressor.linear,
        "own rounds": compressor.averages,
        "unbiased": compressor.unbiased,
        "ragged": compressor.ragged,
        "selects": compressor.selects,
        "no mean": not compressor.conserves,
    }
    return [trait for trait, holds in said.items() if holds]


@functools.cache
def wire_bits(compressor: Compressor) -> float:
    """Return the bits that the payload of a matrix has for each of its elements.

    What is sent dense is not counted by codecs: that is 32 bits an element.
    """
    drawn = torch.randn((SIDE, SIDE), generator=torch.Generator().manual_seed(0))
    alone = Lockstep(1, compressor)
    alone.step([{"weight": SPREAD * drawn}])
    tally = alone.engines[0].tally
    return 8 * tally.payload_bytes / drawn.numel() if tally.elements else 32.0


def bound(compressor: Compressor, numel: int) -> str:
    """Return the bound on the compression error in a few words."""
    found = compressor.bound(numel)
    if compressor.exact:
        return "no error"
    if isinstance(found, Contraction):
        small = found.delta <= 0.99
        return f"contraction\nδ = {_short(found.delta) if small else f'1 − {1 - found.delta:.3g}'}"
    if isinstance(found, Variance):
        return f"variance\nω = {_short(found.omega)}"
    if isinstance(found, Multiple):
        return f"‖error‖² ≤\n{_short(found.omega)}·‖x‖²"
    if isinstance(found, AbsoluteError):
        other = compressor.bound(4 * numel)
        if isinstance(other, AbsoluteError) and abs(other.v - 2 * found.v) <= 1e-6 * found.v:
            return f"‖error‖ ≤\n{_short(found.v / numel**0.5)}·√d"
        return f"‖error‖ ≤\n{_short(found.v)}"
    assert isinstance(found, Unbounded), found
    return "none"


def written(instance: Any) -> str:
    """Return how to write a frozen configuration, without what is at its default anyway."""
    cls, fields = type(instance), dataclasses.fields(instance)
    given = {field.name: getattr(instance, field.name) for field in fields}
    # Of fields without a default, whatever they hold.
    missing = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    plain = cls(**{name: given[name] for name in needed})
    said = [
        f"{name}={value!r}"
        for name, value in given.items()
        if name in needed or value != getattr(plain, name)
    ]
    return f"{cls.__name__}({', '.join(said)})"


def memory_row(name: str, cls: type[Memory]) -> Row:
    """Return which laws a memory keeps, and what it costs."""
    memory = cls()
    cells = {
        "conserves": _yes(memory.conserves),
        "feeds back": _yes(memory.feeds_back),
        "bytes per parameter": str(4 * len(memory.buffers)),
        "fields": _fields(cls),
    }
    return Row(name, cls, cells)


def scheme_row(name: str, cls: type[Scheme]) -> Row:
    """Return what a scheme can carry."""
    takes = [
        text
        for text, holds in (
            ("linear compressors, and those with rounds of their own", cls.averages),
            ("those that select elements", cls.splits),
        )
        if holds
    ]
    cells = {"takes": ", ".join(takes) or "those of one round", "fields": _fields(cls)}
    return Row(name, cls, cells)


def controller_row(name: str, cls: type[Controller]) -> Row:
    """Return how a controller is made."""
    return Row(name, cls, {"fields": _fields(cls)})


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _short(number: float) -> str:
    return f"{number:.3g}"


def _knob(knob: Knob) -> str:
    sends = "more" if knob.more == "bytes" else "less"
    return f"{knob.field}: {knob.low:g} to {knob.high:g},\nhigher sends {sends}"


def _range(entry: Range | Choice) -> str:
    if isinstance(entry, Choice):
        return f"{entry.field}: {', '.join(map(str, entry.values))}"
    return f"{entry.field}: {entry.low:g} to {entry.high:g}, {entry.scale}"


def _fields(cls: type[Any]) -> str:
    return ",\n".join(map(_field, dataclasses.fields(cls)))


def _field(field: dataclasses.Field[Any]) -> str:
    missing = field.default is dataclasses.MISSING
    return field.name if missing else f"{field.name} = {field.default!r}"


FAMILIES: dict[str, Callable[[], list[Row]]] = {
    "compressors": lambda: [compressor_row(*item) for item in sorted(COMPRESSORS.items())],
    "memories": lambda: [memory_row(*item) for item in sorted(MEMORIES.items())],
    "schemes": lambda: [scheme_row(*item) for item in sorted(SCHEMES.items())],
    "controllers": lambda: [
        controller_row(*item) for item in sorted(concrete(vars(controllers), Controller).items())
    ],
}
"""Family -> how to find its rows. Those of compressors are measured, which takes seconds."""
