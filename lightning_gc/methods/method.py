"""Describe a method: compressor, memory, scheme and controller, and the fields that are tuned.

Search spaces are declared, or parsed from YAML; Optuna suggests values from them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from lightning_gc.compressors import COMPRESSORS, Compressor, Identity
from lightning_gc.compressors.base import LEVEL, Traits, has_knob_inside
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.controllers import Controller
from lightning_gc.core import Choice, Range, Space
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import did_you_mean, required_fields
from lightning_gc.core.search_space import check_field, merge
from lightning_gc.core.settings import Settings
from lightning_gc.exchange import Compression
from lightning_gc.exchange.validation import check_controller
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme

if TYPE_CHECKING:
    import optuna

DENSE = "dense"
PREFIX, MEMORY_PREFIX, ROUNDS_PREFIX = "compressor.", "memory.", "rounds."
PREFIXES = (PREFIX, MEMORY_PREFIX, ROUNDS_PREFIX)
"""Prefixes of a method's parameters in a study; parameters without one belong to the model."""


@dataclass(frozen=True)
class Method(Settings):
    """Describe how gradients are exchanged, and which fields its study fixes or tunes.

    Args:
        name: of the method, and of its study.
        compressor: a class, its registered name, or its dotted path; by default ``name``.
            ``"dense"`` is ``Identity``, the baseline.
        fixed: fields that keep one value; those neither fixed nor tuned keep their default.
        space: replaces the compressor's declared space, field by field. Here and in ``fixed``,
            ``level`` is the level of a wrapped compressor.
        memory: as for ``CompressedDDPStrategy``. Its declared space is tuned, unless an instance
            is given.
        scheme: as for ``CompressedDDPStrategy``.
        controller: as for ``CompressedDDPStrategy``.
        memory_space: replaces the memory's declared space, field by field.
        rounds: local steps; None exchanges gradients in every step.
        rounds_space: fields of ``rounds`` that are tuned, such as ``every``.
        min_numel: as for ``CompressedDDPStrategy``; 0 compresses every tensor, as early papers do.
        budget: bytes that one worker may send in a run, in place of the experiment's.

    Raises:
        ValueError: an unknown compressor or field, a range outside the knob's or the compressor's
            limits, a field that is both fixed and tuned, a controller that does not work with the
            compressor and memory, or an invalid budget.

    Example:
        >>> Method("topk_50x", "topk", fixed={"density": 0.01}).tuned
        ()
        >>> [entry.field for entry in Method("qsgd").tuned]
        ['bits', 'block_size']
    """

    name: str
    compressor: str | type[Compressor] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    space: Space = ()
    memory: Memory | str | None = None
    scheme: Scheme | str | None = None
    controller: Controller | None = None
    min_numel: int = MIN_NUMEL
    budget: float | None = None
    memory_space: Space = ()
    rounds: RoundPlan | None = None
    rounds_space: Space = ()

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            refuse(f"A method cannot be called {self.name!r}: use letters and digits")
        check_budget(self.budget)
        for name in ("space", "memory_space", "rounds_space"):
            given: Any = getattr(self, name)
            listed = isinstance(given, tuple | list)
            if not (listed and all(isinstance(entry, Range | Choice) for entry in given)):
                such_as = "(Range('density', 0.001, 0.1, scale='log'),)"
                why = f"give a tuple of ranges and choices, such as {such_as}"
                refuse("Method", why, **{name: given})
        cls, searched = self.compressor_class, {entry.field for entry in self.space}
        if self.name == DENSE and cls is not Identity:
            refuse(
                f"The method {DENSE!r} is the baseline, which does not compress. Give the one "
                f"with {cls.__name__} another name"
            )
        for entry in self.space:
            check_entry(cls, entry)
        for name in self.fixed:
            check_entry(cls, Choice(name, (self.fixed[name],)))
            if name in searched:
                refuse(self.name, f"{name} is both fixed and searched. Do one")
        for entry in self.memory_space:
            check_field(type(self._base_memory()), entry)
        for entry in self.rounds_space:
            check_field(RoundPlan, entry)
        # Find invalid values here, before the first trial.
        for last in (False, True):
            compressor = self.make_compressor(endpoints(self.tuned, last))
            memory = self._make_memory(endpoints(self.tuned_memory, last))
            self._make_rounds(endpoints(self.rounds_space, last))
            if self.controller is not None:
                check_controller(self.controller, compressor, memory, "Method")

    @property
    def compressor_class(self) -> type[Compressor]:
        """The compressor's class."""
        given, known = self.compressor or self.name, {**COMPRESSORS, DENSE: Identity}
        found: Any = known.get(given, given) if isinstance(given, str) else given
        if isinstance(found, str) and "." in found:
            module, _, name = found.rpartition(".")
            try:
                found = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise ValueError(
                    f"The compressor {given!r} cannot be imported: {error}."
                ) from error
        if isinstance(found, type) and issubclass(found, Compressor):
            return found
        raise ValueError(
            f"{given!r} is not a compressor{did_you_mean(given, known)}. lightning-gc list "
            f"compressors prints all names. Write package.module.Class for your own class."
        )

    @property
    def tuned(self) -> Space:
        """Search space of the compressor: the declared one, without fixed fields."""
        space = merge(declared(self.compressor_class), self.space)
        return tuple(entry for entry in space if entry.field not in self.fixed)

    @property
    def tuned_memory(self) -> Space:
        """Search space of the memory."""
        given = isinstance(self.memory, Memory)
        return merge(() if given else self._base_memory().space, self.memory_space)

    def untuned(self) -> dict[str, Any]:
        """Return what the tuned fields are without tuning, by their names in a study."""
        cls, memory = self.compressor_class, self._base_memory()
        rounds = self.rounds or RoundPlan()
        found = {ROUNDS_PREFIX + e.field: getattr(rounds, e.field) for e in self.rounds_space}
        found |= {MEMORY_PREFIX + e.field: getattr(memory, e.field) for e in self.tuned_memory}
        if required_fields(cls) <= set(self.fixed):
            plain = cls(**{name: value for name, value in self.fixed.items() if name != LEVEL})
            found |= {PREFIX + e.field: getattr(plain, e.field) for e in self.tuned}
        return found

    def make_compressor(self, tuned: Mapping[str, Any]) -> Compressor:
        """Return the compressor with its fixed fields and these values of its tuned ones."""
        given, cls = {**self.fixed, **tuned}, self.compressor_class
        level = None if LEVEL in field_names(cls) else given.pop(LEVEL, None)
        compressor = cls(**given)
        if level is not None:  # of the compressor inside
            compressor = compressor.at(level)
        whole = by_default(compressor, self.min_numel, "Method")
        return compressor if self.min_numel == MIN_NUMEL else whole

    def suggest_compressor(self, trial: optuna.trial.BaseTrial) -> Compressor:
        """Return the compressor of a trial."""
        return self.make_compressor(suggest(trial, self.tuned, PREFIX))

    def suggest_memory(self, trial: optuna.trial.BaseTrial) -> Memory:
        """Return the memory of a trial."""
        return self._make_memory(suggest(trial, self.tuned_memory, MEMORY_PREFIX))

    def suggest_rounds(self, trial: optuna.trial.BaseTrial) -> RoundPlan | None:
        """Return the local steps of a trial, or None if gradients are exchanged in every step."""
        return self._make_rounds(suggest(trial, self.rounds_space, ROUNDS_PREFIX))

    def memory_and_scheme(self) -> tuple[Memory, Scheme | None]:
        """Return memory and scheme, given or default; the memory without tuned values.

        Raises:
            ValueError: a name is unknown, or does not work with the compressor.
        """
        compressor = self.make_compressor(endpoints(self.tuned))
        made = Compression(compressor, self.memory, self.scheme).configured("Method")
        return made.memory, made.scheme

    def _base_memory(self) -> Memory:
        return self.memory_and_scheme()[0]

    def _make_memory(self, tuned: Mapping[str, Any]) -> Memory:
        return dataclasses.replace(self._base_memory(), **tuned)  # type: ignore[type-var]

    def _make_rounds(self, tuned: Mapping[str, Any]) -> RoundPlan | None:
        if self.rounds is None and not tuned:
            return None
        return dataclasses.replace(self.rounds or RoundPlan(), **tuned)


def parse_method(word: str) -> Method:
    """Return the method of a name with fields: ``topk:density=0.01,memory=none,scheme=two_shot``.

    Raises:
        ValueError: an unknown name or field, or a refused value.
    """
    name, _, rest = word.partition(":")
    fields: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        field, equals, value = part.partition("=")
        if not equals:
            refuse(f"{word!r}", "write a compressor's fields as topk:density=0.01")
        fields[field.strip()] = yaml.safe_load(value)
    parts = {kind: fields.pop(kind) for kind in ("memory", "scheme") if kind in fields}
    return Method(word, name, fixed=fields, **parts)


def check_budget(budget: Any) -> None:
    """Raise ValueError unless ``budget`` is a positive number of bytes, or None for no limit."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and budget > 0):
        refuse(f"budget={budget!r}: give the bytes that one worker may send in a run")


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
