"""Describe a method: compressor, memory, scheme and controller, and the fields that are tuned."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from lightning_gc.compressors import COMPRESSORS, Compressor, Identity
from lightning_gc.compressors.base import LEVEL
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
from lightning_gc.methods.parameter_space import (
    MEMORY_PREFIX,
    PREFIX,
    ROUNDS_PREFIX,
    check_entry,
    declared,
    endpoints,
    field_names,
    suggest,
)
from lightning_gc.schemes import Scheme

if TYPE_CHECKING:
    import optuna

DENSE = "dense"


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
