"""Side files: save and restore each worker's state next to the checkpoint, for DDP and Fabric."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import Tensor

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.worker_state import (
    CONTROLLER,
    FILE_NAME,
    SHARED,
    SavedDict,
    WorkerState,
    check_same,
)
from lightning_gc.core import (
    ANYTHING,
    COUNT,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Record,
)
from lightning_gc.core.saved_state import CHECKSUM, Tree, average, with_checksum
from lightning_gc.core.settings import check_fields
from lightning_gc.exchange.peers import explaining

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAIN = SavedDict(
    SHARED
    | {"workers": COUNT, "run": TEXT, "stem": FILE_NAME}
    # Shapes of errors by parameter and buffer, and the checksum of each worker's side file.
    | {"shapes": Each(Each(Listed(WHOLE))), "files": Listed(Optional(TEXT))}
)
SIDE = SavedDict({"worker": WHOLE, "workers": WHOLE, "run": TEXT, "stem": TEXT})
FABRIC = SavedDict(
    {
        "stem": FILE_NAME,
        "workers": COUNT,
        "modules": Listed(TEXT),
        "states": Each(Record(others=ANYTHING)),  # means over workers by module
    },
    key="fabric",
    format=2,
)
_LOST = " without a side file"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """Settings of the errors in checkpoints. Strategies take these fields as arguments.

    Args:
        state: errors in checkpoints. ``"full"``: every worker's, each in its own file in the folder
            ``lightning_gc_state`` beside the checkpoint, 4 bytes per parameter and worker; runs
            resume bit for bit. ``"mean"``: their mean, in the checkpoint itself, 4 bytes per
            parameter in all; the errors' mean over workers is preserved, not each worker's own.
            ``"off"``: none; errors begin at zero.
        state_dtype: ``"float32"``, or ``"bfloat16"`` for half the size at the price of rounding.
        owner: the strategy with these arguments, for error messages.
    """

    state: Literal["full", "mean", "off"] = "full"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    owner: str = field(default="Kept", repr=False)

    def __post_init__(self) -> None:
        check_fields(self, self.owner)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of errors in files. In use they are float32."""
        return _DTYPES[self.state_dtype]


class KeptFields(TypedDict, total=False):
    """The fields of ``Kept``, for type checkers."""

    state: Literal["full", "mean", "off"]
    state_dtype: Literal["float32", "bfloat16"]


class _Unusable(ValueError):
    """A file cannot be used; the message names the file."""


@dataclass
class SideFileStore:
    """Save the state of workers in a checkpoint and its side files; restore it, or nothing of it.

    The main file gets the shared state under ``"lightning_gc"`` (``MAIN``). In mode ``"full"``
    every worker writes a side file (``SIDE``) with its ``"averaged"``, ``"compressor"`` and, if
    ``CheckpointParts.own`` is not empty, ``"own"``. In mode ``"mean"`` the main file itself gets
    ``"averaged"``, the mean over workers, and ``"compressor"``. The main file holds the checksums
    of the side files, and is written only after all of them. All workers check all files before any
    worker changes anything.

    Args:
        host: the strategy.
        mode: as in ``CompressedDDPStrategy(state=...)``.
        dtype: dtype of errors in files. In use they are float32.
    """

    host: side_files.Host
    mode: Literal["full", "mean", "off"]
    dtype: torch.dtype
    _saves: int = 0  # saves in which all workers took part
    # Path -> prefixes of the side files written for it, oldest first.
    _stems: dict[str, list[str]] = field(default_factory=dict)

    def save(self, checkpoint: Tree, path: Any, options: Any, write: Callable[[Any], None]) -> None:
        """Write the side files of a full checkpoint, then the checkpoint by ``write``."""
        side_files.make_atomic(self.host.checkpoint_io)
        trained_here = bool(self.host.checkpoint_parts.workers.engines)
        wanted = self.mode != "off" and "optimizer_states" in checkpoint
        full = wanted and trained_here
        if wanted and not trained_here and self.host.is_alone and self.host.world_size > 1:
            warnings.warn(
                "This checkpoint has the weights without errors and optimizers: those stayed in "
                "the worker processes, which have ended. To resume the training, save within the "
                "fit, as ModelCheckpoint does.",
                stacklevel=2,
            )
        if full:
            checkpoint[side_files.KEY] = self._state(path, options)
        self._publish(checkpoint, path, write)
        if full:
            self._remove_old_side_files(path, checkpoint[side_files.KEY]["stem"])

    def _state(self, path: Any, options: Any) -> Tree:
        """Return the content of the main file; write these workers' side files."""
        parts, alone = self.host.checkpoint_parts, self.host.is_alone
        shared = parts.shared_state(*self.host.metrics())
        workers, engine = parts.workers, parts.workers.first
        self._saves += not alone
        save = f"{workers.run}-{'alone' if alone else self._saves}"
        main: Tree = shared | {
            MAIN.key: MAIN.format,
            "mode": "full" if alone else self.mode,
            "workers": parts.files,
            "stem": side_files.stem_of(path, engine.step, save),
            "shapes": {
                name: {buffer: list(tensor.shape) for buffer, tensor in kept.items()}
                for name, kept in engine.buffers.named.items()
            },
            "files": [None] * parts.files,
            **workers.place(),
        }
        if main["torn"]:
            return main  # a round is incomplete: errors are neither those before nor after it
        if main["mode"] == "mean":
            with side_files.awaiting(self.host):
                return main | self._mean(shared)
        return main | {"files": self._write_side_files(main, path, options)}

    def _mean(self, shared: Tree) -> Tree:
        """Return the mean of all workers' states."""
        host, parts = self.host, self.host.checkpoint_parts
        states = [parts.worker_state(shared, index) for index in range(len(parts.workers.engines))]
        first = states[0]
        if len(states) > 1:
            first = WorkerState(shared, average([each.averaged for each in states]), first.own)

        def mean(tensor: Tensor) -> Tensor:
            return host.reduce(tensor.to(host.root_device), reduce_op="mean").cpu()

        return first.over_workers(mean).in_file(self.dtype)

    def _write_side_files(self, main: Tree, path: Any, options: Any) -> list[str | None]:
        """Write this process's side files; return all workers' checksums, None where unknown."""
        acts: dict[int, Callable[[], str]] = {}
        parts = self.host.checkpoint_parts
        for index in range(len(parts.workers.engines)) if parts.saves else ():
            file = parts.file_of(index)
            target = side_files.path_of(path, main["stem"], file, parts.files)
            acts[file] = partial(self._save_own, index, main, target, options, path)
        checksums = side_files.together(self.host, acts, main["workers"], self.host.is_alone)
        return [checksums.get(worker) for worker in range(main["workers"])]

    def _save_own(self, index: int, main: Tree, target: str, options: Any, path: Any) -> str:
        """Write one worker's side file and return its checksum; name the failed step in errors."""
        parts, unsaved = self.host.checkpoint_parts, f"so {path} is not written"

        def content() -> Tree:
            own = {name: main[name] for name in (SIDE.key, "workers", "run", "stem")}
            own |= parts.worker_state(main, index).in_file(self.dtype)
            return with_checksum(own | {"worker": parts.file_of(index)})

        own = explaining(f"could not read its state, {unsaved}", content)()
        problem = f"could not write its state to {target}, {unsaved}"
        return explaining(problem, partial(self._write_side_file, own, target, options))()

    def _write_side_file(self, own: Tree, target: str, options: Any) -> str:
        """Write one worker's side file; return its checksum."""
        io = self.host.checkpoint_io
        side_files.put(target, partial(io.save_checkpoint, own, storage_options=options), io)
        if not side_files.exists(target):
            with side_files.writing(target):
                io.teardown()  # waits for a CheckpointIO that writes in a thread
        if not side_files.exists(target):
            raise FileNotFoundError(
                f"{type(io).__name__} has not written the file; use a CheckpointIO that writes to "
                f"the given path, or state='mean'"
            )
        return str(own[CHECKSUM])

    def _publish(self, checkpoint: Tree, path: Any, write: Callable[[Any], None]) -> None:
        """Write the checkpoint by ``write``, atomically; if worker 0 fails, all workers raise."""
        host, parts = self.host, self.host.checkpoint_parts

        def act() -> None:
            if host.global_rank != 0:
                write(path)  # does nothing
                return
            if side_files.KEY in checkpoint:
                checkpoint[side_files.KEY] = with_checksum(checkpoint[side_files.KEY])
            side_files.put(path, write, host.checkpoint_io)

        problem = f"could not write {path}; if there was one of that name, it is kept"
        first = parts.file_of() if parts.workers.engines else host.global_rank
        number = parts.files if parts.workers.engines else 0
        side_files.together(host, {first: explaining(problem, act)}, number, host.is_alone)

    def _remove_old_side_files(self, path: Any, stem: str) -> None:
        """Remove side files of older checkpoints that ``path`` has overwritten.

        An asynchronous CheckpointIO may not have written ``path`` yet, so the previous save's side
        files stay until the next save. The same thread has written ``path`` by then.
        """
        stems = self._stems.setdefault(str(path), [])
        stems.append(stem)
        del stems[: -2 if side_files.wraps(self.host.checkpoint_io) else -1]
        # When workers save alone, only worker 0 knows that there is a new checkpoint.
        if self.host.global_rank == 0 or (self.host.local_rank == 0 and not self.host.is_alone):
            side_files.remove(path, keep=stems)

    def remove(self, path: Any) -> None:
        """Remove the side files of a checkpoint that has been removed."""
        if self.host.local_rank == 0:
            side_files.remove(path)

    def restore(self, checkpoint: Tree, path: Any) -> None:
        """Restore engines, controller and other state from a checkpoint, if there are engines.

        Raises:
            RuntimeError: on all workers, if one cannot use its files.
        """
        parts, main = self.host.checkpoint_parts, checkpoint.get(side_files.KEY)
        if not parts.workers.engines:
            return
        states = [] if self.mode == "off" else self._agreed(main, path)
        if states:
            problem = f"could not restore the error state of {path}"
            device, says = self.host.root_device, self.host.global_rank == 0
            self._together(explaining(problem, partial(parts.apply, states, device, says)))
            return
        if main is None and parts.workers.first.memory.buffers and self.mode != "off":
            self._log_rank0(f"{path} holds no error state: errors begin at zero.")
        parts.begin_at_zero(main)

    def _together(self, act: Callable[[], Any]) -> dict[int, Any]:
        parts = self.host.checkpoint_parts
        return side_files.together(
            self.host, {parts.file_of(): act}, parts.files, self.host.is_alone
        )

    def _agreed(self, main: Any, path: Any) -> list[WorkerState]:
        """Return each worker's state; raise on all workers if one fails or its file differs."""
        states: list[WorkerState] = []

        def check() -> str:
            if main is None:
                return ""
            with self._usable(path, f"the error state in {path}", main):
                states.extend(self._collect(main, path))
            lost = _LOST if any(state.lost for state in states) else ""
            return f"{main['stem']} {main[CHECKSUM]}{lost}"

        said = self._together(check)
        if any(text.endswith(_LOST) for text in said.values()):
            # Drop state that must be equal on all workers. Without the compressor's state workers
            # would send messages of other shapes; without common buffers weights would differ.
            memory = self.host.checkpoint_parts.workers.configuration.memory
            gone = [CONTROLLER, "memory"] if memory.common else [CONTROLLER]
            states = [state.without(*gone) for state in states]
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
        return states

    def _collect(self, main: Any, path: Any) -> list[WorkerState]:
        """Return the state of each worker of this process.

        It is the worker's own state, or the mean over workers if their number has changed.
        """
        parts, number = self.host.checkpoint_parts, len(self.host.checkpoint_parts.workers.engines)
        mean = isinstance(main, dict) and main.get("mode") == "mean" and not main.get("torn")
        common = Record(maybe=parts.common_structure, others=ANYTHING)
        main = MAIN.opened(
            main,
            parts.structure if mean else {},
            {"common": common, "shard": WHOLE, "shards": COUNT},
        )
        if len(main["files"]) != main["workers"]:
            raise ValueError(f"it has {len(main['files'])} files of {main['workers']} workers")
        parts.check_levels(main)
        if main["torn"]:
            self._log_rank0(f"{path} was saved within a step: errors begin at zero.")
            return [WorkerState(main, {}, ({"compressor": {}},))] * number
        if mean:
            parts.check_own(main, main, main["shapes"])
            own = {"compressor": main["compressor"]}
            return [WorkerState(main, main["averaged"], (own,))] * number
        before, now = main["workers"], parts.files
        places = [each.get("shards", 1) for each in (main, parts.workers.place())]
        if places != [1, 1] and (places[0] != places[1] or before != now):
            raise ValueError(
                f"it was saved by {before} ranks, which had {places[0]} shards of each worker, and "
                f"here are {now} ranks and {places[1]} shards; resume with as many of both"
            )
        if before == now:
            return self._read(main, path, map(parts.file_of, range(number)))
        old = self._read(main, path, range(before))
        self._log_rank0(f"{before} workers' errors are averaged: each of {now} has the mean.")
        return [WorkerState.mean(old)] * number

    def _read(self, main: Tree, path: Any, workers: Iterable[int]) -> list[WorkerState]:
        """Return the states in these workers' side files; a lost state for a missing file."""
        files = {i: side_files.path_of(path, main["stem"], i, main["workers"]) for i in workers}
        lost = [file for file in files.values() if not side_files.exists(file)]
        if lost and self.host.checkpoint_parts.workers.place():
            raise ValueError(f"{', '.join(lost)} is missing, which has shards of the optimizers")
        if lost:
            warnings.warn(
                f"Error state is missing: {', '.join(lost)}. Errors that were in it count as zero. "
                f"Move a checkpoint together with its folder {side_files.FOLDER}.",
                stacklevel=2,
            )
        states = []
        for worker, file in files.items():
            state = WorkerState(main, lost=True)
            if file not in lost:
                with self._usable(path, file, main):
                    state = self._checked(main, worker, file)
            states.append(state)
        return states

    def _checked(self, main: Tree, worker: int, file: str) -> WorkerState:
        """Return the content of a side file, checked."""
        parts = self.host.checkpoint_parts
        own = SIDE.opened(
            side_files.read(file, self.host.checkpoint_io),
            parts.structure,
            {"own": Record(maybe=parts.own_structure, others=ANYTHING)},
        )
        same = {name: main[name] for name in (SIDE.key, "workers", "run", "stem")}
        check_same(own, {"worker": worker} | same)
        if main["files"][worker] not in (None, own[CHECKSUM]):
            raise ValueError("it is not the file that was saved with its checkpoint")
        parts.check_own(own, main, None if parts.workers.place() else main["shapes"])
        alone: Tree = {name: own[name] for name in ("compressor", "own") if name in own}
        return WorkerState(main, own["averaged"], (alone,))

    @contextlib.contextmanager
    def _usable(self, path: Any, what: str, main: Any) -> Iterator[None]:
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

    def _log_rank0(self, sentence: str) -> None:
        if self.host.global_rank == 0:
            _log.info(sentence)


class Handle(Protocol):
    """Attributes of an attached module that Fabric's checkpoint uses."""

    def state_dict(self, mode: Literal["full", "mean"] = "full") -> Tree: ...

    def load_state_dict(self, state: Tree | Sequence[Tree]) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class FabricCheckpoint:
    """Save and restore the state of attached modules with Fabric's checkpoint.

    In mode ``"full"`` each worker first writes its state to its own file. Then worker 0 writes the
    checkpoint, which names these files. A kill leaves either the old checkpoint or the new one,
    with all its files. In mode ``"mean"`` the checkpoint itself has the mean over workers.

    Args:
        handles: name in the checkpoint -> handle of the attached module.
        host: the strategy.
        mode: as in ``CompressedFabricStrategy(state=...)``.
    """

    handles: Mapping[str, Handle]
    host: side_files.AnyHost
    mode: Literal["full", "mean", "off"]

    def save(
        self,
        path: Any,
        state: dict[str, Any],
        write: Callable[[Any, dict[str, Any]], None],
        storage_options: Any = None,
    ) -> None:
        """Write this worker's file, then the checkpoint of ``state`` by ``write``.

        Raises:
            RuntimeError: on all workers, if one cannot write.
        """
        io, workers = self.host.checkpoint_io, self.host.world_size
        mode: Literal["full", "mean"] = "mean" if self.mode == "mean" else "full"
        states = {name: handle.state_dict(mode) for name, handle in self.handles.items()}
        first = next(iter(states.values()))
        stem = side_files.stem_of(path, first["engine"]["step"], first["run"])
        if mode == "full":
            target = side_files.path_of(path, stem, self.host.global_rank, workers)
            save = partial(io.save_checkpoint, states, storage_options=storage_options)
            problem = f"could not write its errors to {target}, so {path} is not written"
            side_files.on_all_ranks(self.host, problem, partial(side_files.put, target, save, io))
        main = {FABRIC.key: FABRIC.format, "stem": stem, "workers": workers, "modules": [*states]}
        main = with_checksum(main | {"states": states if mode == "mean" else {}})

        def complete(there: Any) -> None:
            write(there, {**state, side_files.KEY: main})

        # Workers other than 0 write nothing, but take part in collectives.
        act = (
            partial(side_files.put, path, complete, io)
            if self.host.global_rank == 0
            else partial(complete, path)
        )
        problem = f"could not write {path}; if there was one of that name, it is kept"
        side_files.on_all_ranks(self.host, problem, act)
        if self.host.global_rank == 0 and not side_files.wraps(io):
            side_files.remove(path, keep=[stem])

    def restore(self, path: Any, left: dict[str, Any]) -> None:
        """Load this worker's state from the checkpoint at ``path``.

        Args:
            path: path of the checkpoint.
            left: entries of the checkpoint that are not loaded yet. Our part is removed from it.

        Raises:
            RuntimeError: on all workers, if one cannot read its file.
            ValueError: on all workers, if a state does not fit this run.
        """
        main, off = left.pop(side_files.KEY, None), self.mode == "off"
        if not self.handles:
            if main is not None and not off:
                warnings.warn(
                    f"{path} has the errors of {', '.join(main['modules'])}, which are not "
                    f"restored: no module that Fabric has set up is loaded. Call fabric.load after "
                    f"fabric.setup.",
                    stacklevel=4,
                )
            return
        if main is None or off:
            if self.host.global_rank == 0 and not off:
                _log.info("%s holds no error state: errors begin at zero.", path)
            for handle in self.handles.values():
                handle.reset()
            return
        found: dict[str, Any] = {}
        read = partial(self._read, path, main, found)
        side_files.on_all_ranks(self.host, f"could not restore the errors of {path}", read)
        for name, handle in self.handles.items():
            handle.load_state_dict(found[name])

    def _read(self, path: Any, main: Any, found: dict[str, Any]) -> None:
        """Read this worker's state, the mean, or the states of another number of workers."""
        main = FABRIC.opened(main)
        others = [name for name in self.handles if name not in main["modules"]]
        if others:
            raise ValueError(f"it has no errors of {', '.join(others)}, only of {main['modules']}")
        if main["states"]:
            found.update(main["states"])
            return
        before, now, rank = main["workers"], self.host.world_size, self.host.global_rank
        structure = Record(dict.fromkeys(main["modules"], Record(others=ANYTHING)))
        files = []
        for worker in [rank] if before == now else range(before):
            target = side_files.path_of(path, main["stem"], worker, before)
            if not side_files.exists(target):
                raise FileNotFoundError(
                    f"{target} is missing; move it together with the checkpoint"
                )
            files.append(side_files.read(target, self.host.checkpoint_io))
            structure.check(files[-1])
        for name in main["modules"]:
            states = [file[name] for file in files]
            found[name] = states[0] if before == now else states
