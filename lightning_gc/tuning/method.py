"""One way to exchange gradients, and what of it is tuned. Each method has a study of its own."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna

from lightning_gc.compressors import COMPRESSORS, Choice, Compressor, Identity, PerParameter
from lightning_gc.controllers import Controller
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.registry import make
from lightning_gc.schemes import Scheme
from lightning_gc.tuning.parameter_space import (
    MEMORY_PREFIX,
    PREFIX,
    Space,
    check,
    check_field,
    declared,
    draw,
    ends,
)

DENSE = "dense"


@dataclass(frozen=True)
class Method:
    """A compressor with some fields fixed and the others searched.

    Args:
        name: of the method, and of its study.
        compressor: a class, its registered name, or its dotted path; by default what ``name``
            says. ``"dense"`` is ``Identity``, the baseline.
        fixed: fields that keep one value. Fields that are neither fixed nor searched keep their
            default.
        space: replaces what the compressor declares, field by field.
        memory: as for ``CompressedDDPStrategy``; so are ``scheme`` and ``controller``. What it
            declares as worth tuning is searched, unless an instance is given.
        memory_space: replaces what the memory declares, field by field.
        every_tensor: compress biases and small tensors too, as the early papers do.
        budget: bytes that one worker may send in a run, in place of the experiment's.

    Raises:
        ValueError: an unknown compressor, a field that it lacks, a range that its knob or the
            compressor itself refuses, a field that is fixed and searched.

    Example:
        >>> Method("topk_50x", "topk", fixed={"density": 0.02}).tuned
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
    every_tensor: bool = False
    budget: float | None = None
    memory_space: Space = ()

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"A method cannot be called {self.name!r}: use letters and digits.")
        cls, searched = self.kind, {entry.field for entry in self.space}
        for entry in self.space:
            check(cls, entry)
        for name in self.fixed:
            check(cls, Choice(name, (self.fixed[name],)))
            if name in searched:
                raise ValueError(f"{self.name}: {name} is both fixed and searched; do one.")
        for entry in self.memory_space:
            check_field(type(self._memory()), entry)
        # What compressor or memory refuse is to be known before the first trial.
        for end in (0, -1):
            self._make({e.field: ends(e)[end] for e in self.tuned})
            self._remember({e.field: ends(e)[end] for e in self.tuned_memory})

    @property
    def kind(self) -> type[Compressor]:
        """The compressor's class."""
        return find_compressor(self.compressor or self.name)

    @property
    def tuned(self) -> Space:
        """What each trial draws: the declared space, as far as it is not fixed."""
        space = {entry.field: entry for entry in declared(self.kind)}
        space |= {entry.field: entry for entry in self.space}
        return tuple(entry for name, entry in space.items() if name not in self.fixed)

    @property
    def tuned_memory(self) -> Space:
        """What each trial draws of the memory's fields."""
        given = isinstance(self.memory, Memory)
        space = {} if given else {entry.field: entry for entry in self._memory().space}
        space |= {entry.field: entry for entry in self.memory_space}
        return tuple(space.values())

    def draw(self, trial: optuna.trial.BaseTrial) -> Compressor:
        """Return the compressor of a trial."""
        return self._make(draw(trial, self.tuned, PREFIX))

    def draw_memory(self, trial: optuna.trial.BaseTrial) -> Memory:
        """Return the memory of a trial."""
        return self._remember(draw(trial, self.tuned_memory, MEMORY_PREFIX))

    def _memory(self) -> Memory:
        memory = self.memory
        if isinstance(memory, str):
            memory = make("memory", memory, MEMORIES, Memory)
        return combine(self._make({e.field: ends(e)[0] for e in self.tuned}), memory)[1]

    def _remember(self, drawn: Mapping[str, Any]) -> Memory:
        return dataclasses.replace(self._memory(), **drawn)  # type: ignore[type-var]

    def _make(self, drawn: Mapping[str, Any]) -> Compressor:
        compressor: Compressor = self.kind(**self.fixed, **drawn)
        return PerParameter(compressor) if self.every_tensor else compressor


def find_compressor(given: str | type[Compressor]) -> type[Compressor]:
    """Return the class that is meant: itself, a registered name, or ``package.module.Class``.

    Raises:
        ValueError: there is none.
    """
    known = {**COMPRESSORS, DENSE: Identity}
    found: Any = known.get(given, given) if isinstance(given, str) else given
    if isinstance(found, str) and "." in found:
        module, _, name = found.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"The compressor {given!r} cannot be imported: {error}.") from error
    if isinstance(found, type) and issubclass(found, Compressor):
        return found
    raise ValueError(
        f"{given!r} is not a compressor. Those with a name are {', '.join(sorted(known))}; write "
        f"package.module.Class for one of your own."
    )
