"""Restore error state, levels and controller state from a checkpoint and its side files."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.host import (
    KEY,
    Host,
    configuration_of,
    first_worker,
    together,
)
from lightning_gc.checkpoint.validation import (
    check_declared,
    check_main,
    check_side_file,
)
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.pytree import Tree, average, each_tensor
from lightning_gc.core.registry import with_new_names
from lightning_gc.core.state_structure import Structure
from lightning_gc.exchange.peers import explaining

_NOTHING: Tree = {"averaged": {}, "compressor": {}}
_MISSING = _NOTHING | {"lost": True}
_LOST = " without a side file"
_log = logging.getLogger(__name__)


def _owns(states: Iterable[Tree]) -> list[Tree]:
    """Return the per-worker parts of the states that have one."""
    return [state["own"] for state in states if "own" in state]


class _Unusable(ValueError):
    """A file cannot be used; the message names the file."""


@dataclass(frozen=True)
class Restoring:
    """Restore the state that ``Saving`` has saved, completely or not at all.

    All workers check all files before any worker changes anything.

    Args:
        host: the strategy.
        off: do not restore; errors begin at zero.
    """

    host: Host
    off: bool

    def restore(self, checkpoint: Tree, path: Any) -> None:
        """Restore engines, controller and other state from a checkpoint, if there are engines.

        Raises:
            RuntimeError: on all workers, if one cannot use its files.
        """
        engines = self.host.local_workers.engines
        main: Any = checkpoint.get(KEY)
        if not engines:
            return
        found = [] if self.off else self._read_and_compare(main, path)
        if found:
            problem = f"could not restore the error state of {path}"
            apply = explaining(problem, partial(self.apply, main, found))
            together(self.host, {first_worker(self.host): apply})
            return
        if main is None and engines[0].memory.buffers and not self.off:
            self._log_rank0(f"{path} holds no error state: errors begin at zero.")
        step = main.get("step") if isinstance(main, dict) else 0
        for each in engines:
            each.reset(step if isinstance(step, int) else 0)
        for rounds in self.host.local_workers.rounds:
            rounds.restart()
        if self.host.control_loop is not None:
            self.host.control_loop.begin_anew()

    def _read_and_compare(self, main: Any, path: Any) -> list[Tree]:
        """Return ``_collect``'s states; raise on all workers if one fails or its file differs."""
        found: list[Tree] = []

        def check() -> str:
            if main is None:
                return ""
            with self._usable(path, f"the error state in {path}", main):
                found.extend(self._collect(main, path))
            lost = _LOST if any("lost" in state for state in found) else ""
            return f"{main['stem']} {main.get(CHECKSUM, '')}{lost}"

        said = together(self.host, {first_worker(self.host): check})
        if any(text.endswith(_LOST) for text in said.values()):
            found = [self._without_what_is_common(state) for state in found]
            memory = self.host.local_workers.configuration.memory
            if memory.common and self.host.global_rank == 0:
                warnings.warn(
                    f"Error state of all workers is reset: a worker's side file is missing, and "
                    f"{type(memory).__name__} keeps buffers that must be equal on all workers.",
                    stacklevel=2,
                )
        read = {worker: text.removesuffix(_LOST) for worker, text in said.items()}
        first = min(read)
        others = [str(worker) for worker, save in read.items() if save != read[first]]
        if others:
            raise RuntimeError(
                f"Worker {', '.join(others)} has found another checkpoint at {path} than worker "
                f"{first}; give all workers the same files."
            )
        return found

    def _without_what_is_common(self, state: Tree) -> Tree:
        """Drop entries that must match on all workers, because one worker's side file is missing.

        Without the compressor's state workers would send messages of different shapes. Without a
        memory's common buffers their weights would differ. Sums since the last decision go too.
        """
        common = self.host.local_workers.configuration.memory.common
        gone = {"turn", "memory"} if common else {"turn"}
        averaged = {name: kept for name, kept in state["averaged"].items() if name not in gone}
        return state | {"compressor": {}, "averaged": averaged}

    def _collect(self, main: Tree, path: Any) -> list[Tree]:
        """Return the state of each worker of this process.

        It is the worker's own state, or the mean over workers if their number has changed.
        """
        engines, kept = self.host.local_workers.engines, self._kept
        common = self.host.local_workers.common
        check_main(main, kept, {name: part.common_structure for name, part in common.items()})
        check_declared(main, main, self.host.local_workers)
        if main["torn"]:
            self._log_rank0(f"{path} was saved within a step: errors begin at zero.")
            return [_NOTHING] * len(engines)
        if main["mode"] == "mean":
            mean = {"averaged": main["averaged"], "compressor": main["compressor"]}
            return [mean] * len(engines)
        before, now = main["workers"], engines[0].workers
        if before == now:
            own = self._read(main, path, [engine.worker for engine in engines])
            return [state | {"owns": _owns([state])} for state in own]
        own = self._read(main, path, range(before))
        self._log_rank0(f"{before} workers' errors are averaged: each of {now} has the mean.")
        known = next((state for state in own if state is not _MISSING), _MISSING)
        averaged = average([state["averaged"] for state in own])
        mean = {"averaged": averaged, "compressor": known["compressor"], "owns": _owns(own)}
        lost = {"lost": True} if any("lost" in state for state in own) else {}
        return [mean | lost] * len(engines)

    def _read(self, main: Tree, path: Any, workers: Iterable[int]) -> list[Tree]:
        """Return the content of these workers' side files; ``_MISSING`` where one is missing."""
        files = {i: side_files.path_of(path, main["stem"], i, main["workers"]) for i in workers}
        lost = [file for file in files.values() if not side_files.exists(file)]
        if lost:
            warnings.warn(
                f"Error state is missing: {', '.join(lost)}. Errors that were in it count as zero. "
                f"Move a checkpoint together with its folder {side_files.FOLDER}.",
                stacklevel=2,
            )
        found = []
        for worker, file in files.items():
            own = _MISSING
            if file not in lost:
                with self._usable(path, file, main):
                    own = side_files.read(file, self.host.checkpoint_io)
                    check_side_file(own, main, worker, self._kept, self._alone)
                    check_declared(own, main, self.host.local_workers)
            found.append(own)
        return found

    @property
    def _kept(self) -> dict[str, Structure]:
        return {name: parts[0].structure for name, parts in self.host.local_workers.kept.items()}

    @property
    def _alone(self) -> dict[str, Structure]:
        return {name: parts[0].structure for name, parts in self.host.local_workers.own.items()}

    @contextlib.contextmanager
    def _usable(self, path: Any, what: str, main: Tree) -> Iterator[None]:
        """Name the unusable file and the ways out in an exception of the block."""
        try:
            yield
        except _Unusable:
            raise
        except Exception as error:
            step = main.get("step") if isinstance(main, dict) else None
            before = side_files.checkpoint_before(path, step) if isinstance(step, int) else None
            instead = f"resume from the checkpoint before it, {before}, " if before else ""
            why = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            raise _Unusable(
                f"could not use {what}: {why}. Nothing has been restored. Restore the file, "
                f"{instead}or give the strategy state='off' to begin with errors at zero."
            ) from error

    def apply(self, main: Tree, found: list[Tree]) -> str:
        """Load the state found for each worker of this process, as far as it fits this run."""
        workers, control = self.host.local_workers, self.host.control_loop
        shapes = workers.shapes
        now = configuration_of(self.host)
        buffers = workers.configuration.memory.buffers
        changed = [changes(main["configuration"], now, own, shapes, buffers) for own in found]
        if changed[0].sentences and self.host.global_rank == 0:
            sentences = " ".join(changed[0].sentences)
            warnings.warn(f"Resumed with changes. {sentences}", stacklevel=2)
        for engine, kept in zip(workers.engines, changed, strict=True):
            compressor = each_tensor(kept.compressor, lambda t: t.clone())
            common = {"learning_rates": main["learning_rates"], "step": main["step"]}
            state = {"memory": kept.memory, "compressor": compressor, **common}
            engine.load_state_dict(each_tensor(state, self._there))
        same_controller = changed[0].same_controller
        if control is not None:
            control.begin_anew()
            if main["turn"] is not None and same_controller:
                control.load_state_dict(main["turn"])
        workers.regroup(main["layout"])
        for name, part in workers.common.items():
            if name in main.get("common", {}):
                part.load_common_state(main["common"][name])
        for name, parts in workers.kept.items():
            for each, own in zip(parts, found, strict=True):
                if name in own["averaged"] and (name != "turn" or same_controller):
                    each.load_own_state(each_tensor(own["averaged"][name], self._there))
        for name, alone in workers.own.items():
            for worker, own in zip(alone, found, strict=True):
                states = [state[name] for state in own.get("owns", []) if name in state]
                worker.load_own_states(states)
        return ""

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a loaded tensor on the device on which training uses it."""
        return tensor.to(self.host.root_device)

    def _log_rank0(self, sentence: str) -> None:
        if self.host.global_rank == 0:
            _log.info(sentence)


class Changes(NamedTuple):
    """State to restore, and sentences that name the changes since the checkpoint."""

    memory: Tree
    compressor: Tree
    same_controller: bool
    sentences: list[str]


def changes(
    before: Mapping[str, str],
    now: Mapping[str, str],
    own: Tree,
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Sequence[str] = ("error",),
) -> Changes:
    """Compare a checkpoint's settings with this run's; keep the state that still fits.

    Errors are in units of the gradient and belong to a parameter, so they remain valid for any
    compressor. The compressor's own state does not.

    Args:
        before: the checkpoint's settings, as by ``configuration_of``.
        now: this run's settings.
        own: this worker's part of the checkpoint.
        shapes: parameter name -> shape, in this run.
        buffers: names of the buffers that this run's memory keeps per parameter.
    """
    before = with_new_names(before)
    saved = own["averaged"].get("memory", {})
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
        for name, kept in own["compressor"].items()
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
    same = before["controller"] == now["controller"]
    if not same:
        sentences.append(
            f"Controller {before['controller']} is now {now['controller']}: its state is reset."
        )
    if saved:
        gone = [name for name in saved if name not in shapes]
        reshaped = [name for name in saved if name in shapes and name not in fitting]
        new = [name for name in shapes if name not in saved]
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
