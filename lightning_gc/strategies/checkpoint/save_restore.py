"""Save and restore error state, levels and controller state in a Lightning checkpoint."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_gc.controllers import Controller
from lightning_gc.strategies.checkpoint import side_files
from lightning_gc.strategies.checkpoint.changes import changes
from lightning_gc.synchronizer import Workers
from lightning_gc.synchronizer.control_loop import ControlLoop
from lightning_gc.synchronizer.pytree import Tree, average, each_tensor, reduced
from lightning_gc.transports.distributed import Distributed, gather_text

KEY = "lightning_gc"
FORMAT = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NOTHING: Tree = {"averaged": {}, "compressor": {}}
_log = logging.getLogger(__name__)


class Host(Protocol):
    """Attributes of a Lightning strategy that saving and restoring use."""

    local_workers: Workers
    controller: Controller | None
    control_loop: ControlLoop | None
    checkpoint_io: Any
    root_device: torch.device
    local_rank: int
    global_rank: int
    world_size: int
    lightning_module: Any
    reduce: Callable[..., Tensor]


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores engines, controller and other state of workers (``Workers.kept``).

    The main file gets, under ``"lightning_gc"``, what ``_add`` lists. In mode ``"full"`` every
    worker writes a side file, ``{"format", "worker", "averaged", "compressor"}``; in mode
    ``"mean"`` the main file gets the latter two itself, averaged over workers. The main file is
    written only if all workers have written their side files.

    Args:
        host: the strategy.
        mode: as ``CompressedDDPStrategy(state=...)``.
        dtype: of errors in files; in use they are float32.
    """

    host: Host
    mode: Literal["full", "mean", "off"]
    dtype: torch.dtype
    # Path -> prefixes of the side files written for it, oldest first.
    _stems: dict[str, list[str]] = field(default_factory=dict)

    def save(self, checkpoint: Tree, path: Any, options: Any, write: Callable[[Any], None]) -> None:
        """Write the side files of a full checkpoint, then, by ``write``, the checkpoint itself."""
        full = bool(self.host.local_workers.engines) and "optimizer_states" in checkpoint
        full = full and self.mode != "off"
        if full:
            self._add(checkpoint, path, options)
        self._publish(path, write)
        if full:
            self._remove_old_side_files(path)

    def _add(self, checkpoint: Tree, path: Any, options: Any) -> None:
        """Add state to ``checkpoint`` before it is written, and write these workers' side files."""
        host, workers, control = self.host, self.host.local_workers, self.host.control_loop
        trainer = host.lightning_module.trainer
        engine = workers.first
        # After an exception this may be the only worker that saves; a collective would hang.
        alone = trainer.interrupted
        stem = side_files.stem_of(path, engine.step)
        main: Tree = {
            "format": FORMAT,
            "mode": self.mode,
            "workers": engine.workers,
            "step": engine.step,
            "stem": stem,
            "torn": engine.rounds.torn,
            "layout": [list(names) for names in workers.layout],
            "configuration": self._configuration(),
            "learning_rates": dict(engine.learning_rates.of_errors),
            "turn": None if control is None else control.state_dict(trainer.callback_metrics),
        }
        checkpoint[KEY] = main
        if engine.rounds.torn:
            return  # a round is incomplete: errors are neither those before nor after it
        owns = [self.own(index) for index in range(len(workers.engines))]
        if self.mode == "mean" and not alone:
            own = owns[0]
            if len(owns) > 1:
                own["averaged"] = average([each["averaged"] for each in owns])

            def mean(tensor: Tensor) -> Tensor:
                return host.reduce(tensor.to(host.root_device), reduce_op="mean").cpu()

            own["averaged"] = reduced(own["averaged"], mean)
            own["averaged"]["memory"] = self.small(own["averaged"]["memory"])
            checkpoint[KEY] = main | own
            return
        main["mode"] = "full"
        for each, own in zip(workers.engines, owns, strict=True):
            target = side_files.path_of(path, stem, each.worker, each.workers)
            own |= {"format": FORMAT, "worker": each.worker}
            own["averaged"]["memory"] = self.small(own["averaged"]["memory"])
            save = host.checkpoint_io.save_checkpoint
            write = partial(save, own, target, storage_options=options)
            what = f"its error state to {target}. {path} has not been written"
            self._all_or_raise(write, what, alone)

    def restore(self, checkpoint: Tree, path: Any) -> None:
        """Restore engines, controller and other state from a checkpoint, if there are engines."""
        engines, main = self.host.local_workers.engines, checkpoint.get(KEY)
        if not engines:
            return
        if self.mode == "off" or main is None:
            if main is None and engines[0].memory.buffers:
                self._log_rank0(f"{path} holds no error state: errors begin at zero.")
            for each in engines:
                each.reset(main["step"] if main else 0)
            return
        if main["format"] > FORMAT:
            raise ValueError(
                f"{path} has error state of format {main['format']}, but this version of "
                f"lightning_gc knows formats up to {FORMAT}; upgrade it, or use state='off'."
            )
        found: list[Tree] = []

        def collect() -> None:
            found.extend(self._collect(main, path))

        self._all_or_raise(collect, f"the error state of {path}", alone=False, verb="read")
        self._apply(main, found)

    def _publish(self, path: Any, write: Callable[[Any], None]) -> None:
        """Write the checkpoint by ``write``; if worker 0 fails, all workers raise.

        A local file is written under another name and then renamed: a full disk must not destroy
        an existing checkpoint.
        """
        alone = self.host.lightning_module.trainer.interrupted
        where = os.fspath(path)
        direct = "://" in where or self._writes_later or os.path.isdir(where)

        def act() -> None:
            if direct or self.host.global_rank != 0:
                write(path)  # does nothing on workers other than worker 0
            else:
                _write_atomically(where, write)

        self._all_or_raise(act, f"{where}. If there was one of that name, it is kept", alone)

    @property
    def _writes_later(self) -> bool:
        """Whether the CheckpointIO wraps another, and so may write in a thread."""
        return hasattr(self.host.checkpoint_io, "checkpoint_io")

    def _remove_old_side_files(self, path: Any) -> None:
        """Remove side files of older checkpoints that ``path`` has overwritten.

        Two older ones are kept where this one may not have been written yet.
        """
        stems = self._stems.setdefault(str(path), [])
        stem = side_files.stem_of(path, self.host.local_workers.first.step)
        if stem not in stems:
            stems.append(stem)
        del stems[: -3 if self._writes_later else -1]
        if self.host.local_rank == 0:
            side_files.remove(path, keep=stems)

    def own(self, index: int = 0) -> Tree:
        """Return a copy, in the host's memory, of one worker's own state."""
        workers = self.host.local_workers
        state = workers.engines[index].state_dict()
        averaged: Tree = {"memory": state["memory"]}
        averaged |= {name: kept[index].own_state() for name, kept in workers.kept.items()}
        own = {"averaged": averaged, "compressor": state["compressor"]}
        return each_tensor(own, lambda t: t.detach().cpu())

    def small(self, memory: Tree) -> Tree:
        """Return errors in the dtype for files."""
        return each_tensor(memory, lambda t: t.to(self.dtype))

    def _collect(self, main: Tree, path: Any) -> list[Tree]:
        """Return each worker's state: its own, or the mean if the number of workers changed."""
        engines = self.host.local_workers.engines
        if main["mode"] == "mean":
            common = {"averaged": main["averaged"], "compressor": main["compressor"]}
            return [common] * len(engines)
        if main["torn"]:
            self._log_rank0(f"{path} was saved within a step: errors begin at zero.")
            return [_NOTHING] * len(engines)
        before, now = main["workers"], engines[0].workers
        if before == now:
            return self._read(main, path, [engine.worker for engine in engines])
        own = self._read(main, path, range(before))
        self._log_rank0(f"{before} workers' errors are averaged: each of {now} has the mean.")
        known = next((state for state in own if state is not _NOTHING), _NOTHING)
        averaged = average([state["averaged"] for state in own])
        return [{"averaged": averaged, "compressor": known["compressor"]}] * len(engines)

    def _read(self, main: Tree, path: Any, workers: Iterable[int]) -> list[Tree]:
        """Return the content of these workers' side files; nothing where one is missing."""
        files = [side_files.path_of(path, main["stem"], i, main["workers"]) for i in workers]
        lost = [file for file in files if not side_files.exists(file)]
        if lost:
            warnings.warn(
                f"Error state is missing: {', '.join(lost)}. Errors that were in it count as zero. "
                f"Move a checkpoint together with its folder {side_files.FOLDER}.",
                stacklevel=2,
            )
        io = self.host.checkpoint_io
        return [_NOTHING if file in lost else side_files.read(file, io) for file in files]

    def _apply(self, main: Tree, found: list[Tree]) -> None:
        workers, control = self.host.local_workers, self.host.control_loop
        shapes = workers.shapes
        now = self._configuration()
        changed = [changes(main["configuration"], now, own, shapes) for own in found]
        if changed[0].sentences and self.host.global_rank == 0:
            sentences = " ".join(changed[0].sentences)
            warnings.warn(f"Resumed with changes. {sentences}", stacklevel=2)
        for engine, kept in zip(workers.engines, changed, strict=True):
            compressor = each_tensor(kept.compressor, lambda t: t.clone())
            common = {"learning_rates": main["learning_rates"], "step": main["step"]}
            engine.load_state_dict({"memory": kept.memory, "compressor": compressor, **common})
        same_controller = changed[0].same_controller
        if control is not None and main["turn"] is not None and same_controller:
            control.load_state_dict(main["turn"])
        workers.regroup(main["layout"])
        for name, parts in workers.kept.items():
            for part, own in zip(parts, found, strict=True):
                if name in own["averaged"] and (name != "turn" or same_controller):
                    part.load_own_state(own["averaged"][name])

    def _configuration(self) -> dict[str, str]:
        """Return ``repr`` of compressor, memory and controller, on which state depends."""
        parts = self.host.local_workers.configuration
        return {
            "compressor": repr(parts.compressor),
            "memory": repr(parts.memory),
            "controller": repr(self.host.controller),
        }

    def _all_or_raise(
        self, act: Callable[[], None], what: str, alone: bool, verb: str = "write"
    ) -> None:
        """Call ``act`` on all workers; if one fails, all raise with its index and error."""
        host, problem, cause = self.host, "", None
        try:
            act()
        except Exception as error:
            problem, cause = f"{type(error).__name__}: {error}", error
        problems = [problem]
        if not alone and host.world_size > 1:
            problems = gather_text(problem, Distributed(), host.root_device)
        failed = [i for i, text in enumerate(problems) if text]
        if failed:
            raise RuntimeError(
                f"Worker {', '.join(map(str, failed))} of {len(problems)} could not {verb} {what}. "
                f"{problems[failed[0]]}"
            ) from cause

    def _log_rank0(self, sentence: str) -> None:
        if self.host.global_rank == 0:
            _log.info(sentence)


def _write_atomically(where: str, write: Callable[[Any], None]) -> None:
    folder, base = os.path.split(where)
    part = os.path.join(folder, side_files.FOLDER, f"{base}.part")
    try:
        write(part)
        if os.path.isdir(part):
            shutil.move(part, where)
        elif os.path.isfile(part):
            os.replace(part, where)
    finally:
        if os.path.isfile(part):
            os.remove(part)
        side_files.tidy(where)
