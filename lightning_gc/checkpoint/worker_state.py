"""CheckpointParts: what a checkpoint keeps of workers, taken as ``WorkerState``, checked, applied.

All stores save these values: side files, shards, and the ``state_dict`` of ``attach``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gc.control.control_loop import CONTROL_STATE, ControlLoop, HasRounds
from lightning_gc.core import (
    ANYTHING,
    COUNT,
    TEXT,
    WHOLE,
    Leaf,
    Listed,
    Optional,
    Record,
    Structure,
)
from lightning_gc.core.saved_state import (
    CHECKSUM,
    FLAG,
    Tree,
    average,
    check_checksum,
    each_tensor,
    reduced,
)
from lightning_gc.engine.engine import ENGINE_STATE, compressor_state
from lightning_gc.engine.error_buffers import to_host
from lightning_gc.engine.levels import RequestedLevels
from lightning_gc.exchange.workers import Workers

CONTROLLER = "controller"
"""Name of the control loop's state in ``shared`` and of its statistics in ``averaged``."""
MODULE = "module"
"""Name in ``CheckpointParts.common`` of a module that nothing else saves."""


@dataclass(frozen=True)
class WorkerState:
    """One worker's state, or the mean of several.

    Attributes:
        shared: equal on all workers: step, run, layout, configuration, learning rates, levels, and
            the states of the control loop and of ``CheckpointParts.common``.
        averaged: errors and statistics. Their mean over workers replaces them if W has changed.
        own: ``{"compressor", "own"}`` of each saved worker that ``averaged`` is the mean of: the
            compressor's state, and the states of ``CheckpointParts.own``.
        lost: a worker's file is missing, so its part is empty and counts as zero.
    """

    shared: Tree
    averaged: Tree = field(default_factory=dict)
    own: tuple[Tree, ...] = ()
    lost: bool = False

    @staticmethod
    def mean(states: Sequence[WorkerState]) -> WorkerState:
        """Return the state with which each of another number of workers begins.

        The mean error over workers stays the same, so no gradient is lost.
        """
        averaged = average([state.averaged for state in states])
        own = tuple(part for state in states for part in state.own)
        return WorkerState(states[0].shared, averaged, own, any(each.lost for each in states))

    def over_workers(self, mean: Callable[[Tensor], Tensor]) -> WorkerState:
        """Return the mean over all workers, by the collective ``mean``, without their own parts."""
        compressor = self.own[0]["compressor"]
        return replace(
            self, averaged=reduced(self.averaged, mean), own=({"compressor": compressor},)
        )

    def in_file(self, dtype: torch.dtype) -> Tree:
        """Return the entries of a worker's file, with errors in ``dtype``."""
        memory = each_tensor(self.averaged["memory"], lambda tensor: tensor.to(dtype))
        return {"averaged": self.averaged | {"memory": memory}, **self.own[0]}

    def without(self, *names: str) -> WorkerState:
        """Return it without these names of ``averaged`` and without the compressor's state."""
        averaged = {name: kept for name, kept in self.averaged.items() if name not in names}
        return replace(self, averaged=averaged, own=tuple(o | {"compressor": {}} for o in self.own))


class HasWorkerState(Protocol):
    """Part of a worker's checkpoint besides its engine's state."""

    @property
    def structure(self) -> Structure:
        """What ``own_state`` returns."""

    def own_state(self) -> dict[str, Any]:
        """Return nested dicts of tensors and numbers that may be averaged over workers."""

    def load_own_state(self, state: Any) -> None:
        """Resume from ``own_state()``, or from its mean over workers."""


class HasCommonState(Protocol):
    """Part of a checkpoint that is equal on all workers."""

    @property
    def common_structure(self) -> Structure:
        """What ``common_state`` returns."""

    def common_state(self) -> dict[str, Any]:
        """Return nested dicts of tensors and numbers."""

    def load_common_state(self, state: Any) -> None:
        """Resume from ``common_state()``."""


class BelongsToWorker(Protocol):
    """Part of a worker's checkpoint that is not averaged, such as its optimizer's state."""

    @property
    def structure(self) -> Structure:
        """What ``own_state`` returns."""

    def own_state(self) -> dict[str, Any]:
        """Return nested dicts of tensors and plain values."""

    def over_workers(self, state: Any, mean: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return ``own_state()`` with the means over workers of what has one, by ``mean``."""

    def load_own_states(self, states: Sequence[Any]) -> None:
        """Resume from this worker's ``own_state()``, or from all states if W has changed."""


@dataclass
class CheckpointParts:
    """Save, check and restore the state of the workers in one process.

    It outlives a fit, and the next fit continues with it.

    Attributes:
        workers: with their engines.
        control: their control loop; None without a controller, or before the first fit.
        kept: name -> other state of each of these workers; averaged if W changes.
        own: name -> state of each of these workers, for its side file; not averaged.
        common: name -> state that is equal on all workers, for the checkpoint itself.
        settings: further settings that saved state depends on, as text. ``"exchanged"`` names the
            quantity that errors belong to, if it is not gradients. ``"weights"`` names the
            compressor of gathered weights, in FSDP.
        rounds: of each of these workers, with local steps.
        saves: whether this process writes their side files; one of an island's does.
    """

    workers: Workers
    control: ControlLoop | None = None
    kept: dict[str, Sequence[HasWorkerState]] = field(default_factory=dict)
    own: dict[str, Sequence[BelongsToWorker]] = field(default_factory=dict)
    common: dict[str, HasCommonState] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    rounds: Sequence[HasRounds] = ()
    saves: bool = True

    @property
    def configuration(self) -> dict[str, str]:
        """The settings that saved state depends on, as text."""
        return {
            "compressor": repr(self.workers.configuration.compressor),
            "memory": repr(self.workers.configuration.memory),
            CONTROLLER: repr(self.control and self.control.controller),
            **self.settings,
        }

    @property
    def exchanged(self) -> str:
        """The quantity that errors belong to: ``"gradients"`` or ``"weights"``."""
        return self.settings.get("exchanged", "gradients")

    def file_of(self, index: int = 0) -> int:
        """Return the number of the side file of one of these workers."""
        place = self.workers.place()
        return self.workers.engines[index].worker * place.get("shards", 1) + place.get("shard", 0)

    @property
    def files(self) -> int:
        """How many side files all processes write."""
        return self.workers.first.workers * self.workers.place().get("shards", 1)

    def shared_state(
        self, metrics: Mapping[str, Any] | None = None, due: Iterable[str] = ()
    ) -> Tree:
        """Return the state that is equal on all workers.

        Args:
            metrics: current values of metrics, for the controller's next decision.
            due: names of metrics that are yet to come.
        """
        engine, control = self.workers.first, self.control
        state: Tree = {
            "step": engine.step,
            "run": self.workers.run,
            "torn": engine.torn,
            "layout": [list(names) for names in self.workers.layout],
            "configuration": self.configuration,
            "learning_rates": dict(engine.learning_rates.of_errors),
            CONTROLLER: None if control is None else control.state_dict(metrics or {}, due),
        }
        if self.common:
            common = {name: part.common_state() for name, part in self.common.items()}
            state["common"] = each_tensor(common, to_host)
        return state

    def worker_state(self, shared: Tree, index: int = 0) -> WorkerState:
        """Return the state of one of these workers, in CPU memory."""
        engine = self.workers.engines[index].state_dict()
        averaged: Tree = {"memory": engine["memory"]} | self.averaged_state(index)
        own = on_host({"compressor": engine["compressor"]})
        if self.own:
            own["own"] = each_tensor(self.own_state(index), to_host)
        return WorkerState(shared, on_host(averaged), (own,))

    def averaged_state(self, index: int = 0) -> Tree:
        """Return a worker's statistics and other state that may be averaged, except its errors."""
        averaged = {name: kept[index].own_state() for name, kept in self.kept.items()}
        if self.control is not None:
            averaged[CONTROLLER] = self.control.statistics[index].own_state()
        return averaged

    def own_state(self, index: int = 0) -> Tree:
        """Return a worker's state that is not averaged, by name."""
        return {name: parts[index].own_state() for name, parts in self.own.items()}

    @property
    def structure(self) -> dict[str, Structure]:
        """The structure of a worker's ``"averaged"`` and ``"compressor"`` in a file.

        Unknown names, such as the totals of a monitor that this run lacks, are allowed.
        """
        kept = {name: parts[0].structure for name, parts in self.kept.items()}
        if self.control is not None:
            kept[CONTROLLER] = self.control.statistics[0].structure
        memory = {"memory": ENGINE_STATE["memory"]}
        averaged = Record(memory, maybe=kept, others=ANYTHING)
        return {"averaged": averaged, "compressor": ENGINE_STATE["compressor"]}

    @property
    def own_structure(self) -> dict[str, Structure]:
        """The structure of ``own_state``, by name."""
        return {name: parts[0].structure for name, parts in self.own.items()}

    @property
    def common_structure(self) -> dict[str, Structure]:
        """The structure of all states in ``common``, by name."""
        return {name: part.common_structure for name, part in self.common.items()}

    def check_levels(self, shared: Tree) -> None:
        """Raise ValueError for a controller's levels that this compressor does not declare."""
        if self._same_compressor(shared):
            self.check_declared({}, (shared[CONTROLLER] or {}).get("levels"), {})

    def check_own(self, own: Tree, shared: Tree, shapes: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError for state that this run's compressor does not declare, or other shapes.

        The state of another compressor, and of parameters that have another shape now, is ignored.

        Args:
            own: a file's content, checked by ``SavedDict.opened``.
            shared: the state that is equal on all workers, also checked.
            shapes: parameter -> buffer -> shape of the errors; None if they are in shards.
        """
        if self._same_compressor(shared):
            same = {
                name: shape
                for name, shape in self.workers.shapes.items()
                if all(each == list(shape) for each in (shapes or {}).get(name, {}).values())
            }
            kept = own["compressor"]
            self.check_declared({n: kept[n] for n in kept if n in same}, None, same)
        memory = own["averaged"]["memory"]
        if not memory or shapes is None:  # no errors: a worker that resumed without its side file
            return
        found = {n: {b: list(t.shape) for b, t in kept.items()} for n, kept in memory.items()}
        for name in found.keys() | shapes.keys():
            if found.get(name) != shapes.get(name):
                raise ValueError(
                    f"averaged/memory/{name} has shapes {found.get(name)}, but its checkpoint says "
                    f"{shapes.get(name)}"
                )

    def check_declared(
        self,
        state: Mapping[str, Any],
        levels: Any,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        place: str = "",
    ) -> None:
        """Raise ValueError if saved state is not such as this compressor declares it.

        Args:
            state: parameter name -> the compressor's state, of the same compressor.
            levels: as ``Levels.requested`` returns them.
            shapes: parameter name -> the shape of this process's part, when ``state`` was saved.
            place: where ``state`` lies.
        """
        compressor = self.workers.configuration.compressor
        shapes = self.workers.shapes if shapes is None else shapes
        compressor_state(compressor, shapes).check(state, f"{place}compressor")
        RequestedLevels(compressor).check(levels, "levels")

    def _same_compressor(self, shared: Tree) -> bool:
        saved: str = shared["configuration"]["compressor"]
        return saved == repr(self.workers.configuration.compressor)

    def apply(
        self, states: Sequence[WorkerState], device: torch.device, says: bool = False
    ) -> None:
        """Load one checked state per worker of this process, as far as it fits this run.

        Args:
            states: of these workers.
            device: the device on which training uses them.
            says: whether to warn of changes since the checkpoint.
        """
        workers, control, shared = self.workers, self.control, states[0].shared
        now, buffers = self.configuration, workers.configuration.memory.buffers
        before, shapes = shared["configuration"], workers.shapes
        kept = [changes(before, now, state, shapes, buffers) for state in states]
        if kept[0].sentences and says:
            warnings.warn(f"Resumed with changes. {' '.join(kept[0].sentences)}", stacklevel=3)

        def there(tree: Tree) -> Tree:
            return each_tensor(tree, lambda tensor: tensor.to(device))

        rest = {name: shared[name] for name in ("learning_rates", "step")}
        for engine, each in zip(workers.engines, kept, strict=True):
            compressor = each_tensor(each.compressor, Tensor.clone)
            engine.load_state_dict(there({"memory": each.memory, "compressor": compressor, **rest}))
        same_controller = kept[0].same_controller
        if control is not None and same_controller and shared[CONTROLLER] is not None:
            control.load_state_dict(shared[CONTROLLER])
        elif control is not None:
            control.begin_anew()
        if shared.get("levels") is not None:
            workers.set_levels(*shared["levels"])
        workers.regroup(shared["layout"])
        common = shared.get("common", {})
        for name in (n for n in self.common if n in common):
            self.common[name].load_common_state(common[name])
        statistics = {CONTROLLER: control.statistics} if control and same_controller else {}
        for index, state in enumerate(states):
            every: Mapping[str, Sequence[HasWorkerState]] = {**self.kept, **statistics}
            for name in (n for n in every if n in state.averaged):
                every[name][index].load_own_state(there(state.averaged[name]))
            for name, alone in self.own.items():
                parts = [part["own"] for part in state.own if name in part.get("own", {})]
                alone[index].load_own_states([part[name] for part in parts])

    def begin_at_zero(self, shared: Any) -> None:
        """Reset errors, rounds and controller; continue from the saved step, if there is one."""
        step = shared.get("step") if isinstance(shared, dict) else 0
        for engine in self.workers.engines:
            engine.reset(step if isinstance(step, int) else 0)
        for rounds in self.rounds:
            rounds.restart()
        if self.control is not None:
            self.control.begin_anew()


def on_host(tree: Tree) -> Tree:
    """Return a tree with its tensors in CPU memory."""
    return each_tensor(tree, lambda tensor: tensor.detach().cpu())


class Changes(NamedTuple):
    """State to restore, and sentences that name the changes since the checkpoint."""

    memory: Tree
    compressor: Tree
    same_controller: bool
    sentences: list[str]


def changes(
    before: Mapping[str, str],
    now: Mapping[str, str],
    state: WorkerState,
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Sequence[str] = ("error",),
) -> Changes:
    """Compare a checkpoint's settings with this run's; keep the state that still fits.

    Errors are in units of the gradient and belong to a parameter, so they remain valid for any
    compressor. The compressor's own state does not.

    Args:
        before: the checkpoint's settings, as ``CheckpointParts.configuration``.
        now: this run's settings.
        state: this worker's.
        shapes: parameter name -> shape, in this run.
        buffers: names of the buffers that this run's memory keeps per parameter.
    """
    saved = state.averaged.get("memory", {})
    units = [each.get("exchanged", "gradients") for each in (before, now)]
    dropped = bool(saved) and units[0] != units[1]
    if dropped:
        saved = {}
    fitting = {
        name: kept
        for name, kept in saved.items()
        if all(tuple(tensor.shape) == shapes.get(name) for tensor in kept.values())
    }
    compressor = {
        name: kept
        for name, kept in (state.own[0]["compressor"] if state.own else {}).items()
        if name in shapes and (name in fitting or name not in saved)
    }
    sentences = []
    if dropped:
        sentences.append(
            f"Errors are dropped: they belong to {units[0]}, but this run exchanges {units[1]}."
        )
    had = sorted({name for kept in saved.values() for name in kept})
    other_memory = before["memory"] != now["memory"]
    if before["compressor"] != now["compressor"]:
        ends = ["its own state is reset"] if compressor else []
        if not other_memory:  # otherwise the memory's sentence covers errors
            ends.insert(0, "errors are kept" if "error" in had else "there are no errors to keep")
        end = ": " + ", ".join(ends) if ends else ""
        sentences.append(f"Compressor {before['compressor']} is now {now['compressor']}{end}.")
        compressor = {}
    if other_memory:
        sentences.append(f"Memory {before['memory']} is now {now['memory']}: {_kept(had, buffers)}")
    gathered = [each.get("weights", "None") for each in (before, now)]
    if gathered[0] != gathered[1]:
        sentences.append(
            f"Weights' compressor {gathered[0]} is now {gathered[1]}: exact weights are kept."
        )
    same = before[CONTROLLER] == now[CONTROLLER]
    if not same:
        sentences.append(
            f"Controller {before[CONTROLLER]} is now {now[CONTROLLER]}: its state is reset."
        )
    if saved:
        gone = [name for name in saved if name not in shapes]
        reshaped = [name for name in saved if name in shapes and name not in fitting]
        new = [name for name, shape in shapes.items() if name not in saved and 0 not in shape]
        for names, what in (
            (gone, "removed, their errors are dropped"),
            (reshaped, "of another shape, their errors begin at zero"),
            (new, "new, their errors begin at zero"),
        ):
            if names:
                sentences.append(f"Parameters {what}: {', '.join(names)}.")
        if len(fitting) < len(saved):
            sentences.append(f"Parameters that keep errors: {', '.join(fitting) or 'none'}.")
    return Changes(fitting, compressor, same, sentences)


def _kept(had: Sequence[str], has: Sequence[str]) -> str:
    """Return a sentence: which of a memory's buffers are kept, dropped, or zero at first."""
    words = []
    for names, what in (
        ([name for name in had if name in has], "kept"),
        ([name for name in had if name not in has], "dropped"),
        ([name for name in has if name not in had], "zero at first"),
    ):
        if names:
            words.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {what}")
    said = ", ".join(words) if words else "neither has buffers"
    if "error" in had and "error" not in has:
        said += ". To keep the errors, give a memory with an error buffer, such as ErrorFeedback()"
    return f"{said}."


# ------------------------------------------------------------------------------- the validator

FILE_NAME = Leaf(
    "the beginning of a file's name", lambda v: isinstance(v, str) and v == os.path.basename(v)
)
SHARED: dict[str, Structure] = {
    "step": WHOLE,
    "layout": Listed(Listed(TEXT)),
    "configuration": Record(
        dict.fromkeys(("compressor", "memory", CONTROLLER), TEXT),
        dict.fromkeys(("exchanged", "weights"), TEXT),
    ),
    "learning_rates": ENGINE_STATE["learning_rates"],
    CONTROLLER: Optional(CONTROL_STATE),
    "mode": Leaf("'full' or 'mean'", lambda v: v in ("full", "mean")),
    "torn": FLAG,
}
"""Entries of ``"lightning_gc"`` in the checkpoints of all strategies."""


@dataclass(frozen=True)
class SavedDict:
    """Structure of a saved dict with a checksum.

    Args:
        always: required entries.
        key: name of the entry with the format.
        format: the format that this version writes and reads.
    """

    always: Mapping[str, Structure]
    key: str = "format"
    format: int = 3

    def opened(
        self,
        saved: Any,
        more: Mapping[str, Structure] | None = None,
        maybe: Mapping[str, Structure] | None = None,
    ) -> Tree:
        """Return a saved dict; check format, checksum and structure.

        Args:
            saved: what was read.
            more: further entries that it must have.
            maybe: further entries that it may have.

        Raises:
            ValueError: it is damaged, malformed, or of another format.
        """
        if not isinstance(saved, dict):
            raise ValueError(f"it holds a {type(saved).__name__} where a dict was saved")
        number = saved.get(self.key)
        if type(number) is not int or number != self.format:
            raise ValueError(
                f"it has format={number!r}, but this version of lightning_gc reads format "
                f"{self.format}; use the version that saved it"
            )
        check_checksum(saved)
        names = {self.key: COUNT, CHECKSUM: TEXT, **self.always, **(more or {})}
        Record(names, maybe or {}).check(saved)
        return saved


def check_same(own: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError if a file belongs to another checkpoint or worker than expected."""
    for name, value in expected.items():
        if own[name] != value:
            raise ValueError(f"it has {name}={own[name]!r}, but its checkpoint {name}={value!r}")
