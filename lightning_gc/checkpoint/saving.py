"""Save error state, levels and controller state in a checkpoint and its side files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.host import (
    KEY,
    Host,
    configuration_of,
    first_worker,
    is_alone,
    together,
)
from lightning_gc.checkpoint.side_files import make_atomic, wraps, write_atomically
from lightning_gc.checkpoint.validation import FORMAT
from lightning_gc.control.training_progress import metrics_due
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import with_checksum
from lightning_gc.core.pytree import Tree, average, each_tensor, reduced
from lightning_gc.engine.error_buffers import to_host
from lightning_gc.exchange.peers import explaining

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Saving:
    """Save engines, controller and other state of workers (``Workers.kept``).

    The main file gets the entries of ``_add`` under ``"lightning_gc"``. In mode ``"full"`` every
    worker writes a side file: ``{"format", "worker", "workers", "run", "stem", "averaged",
    "compressor", "sha256"}``, and ``"own"`` if ``Workers.own`` is not empty. In mode ``"mean"`` the
    main file itself gets ``"averaged"``, the mean over workers, and ``"compressor"``. The main file
    holds the checksums of the side files, and is written only after all of them.

    Args:
        host: the strategy.
        mode: as in ``CompressedDDPStrategy(state=...)``.
        dtype: dtype of errors in files. In use they are float32.
    """

    host: Host
    mode: Literal["full", "mean", "off"]
    dtype: torch.dtype
    _saves: int = 0  # saves in which all workers took part
    # Path -> prefixes of the side files written for it, oldest first.
    _stems: dict[str, list[str]] = field(default_factory=dict)

    def save(self, checkpoint: Tree, path: Any, options: Any, write: Callable[[Any], None]) -> None:
        """Write the side files of a full checkpoint, then the checkpoint by ``write``."""
        make_atomic(self.host.checkpoint_io)
        full = bool(self.host.local_workers.engines) and "optimizer_states" in checkpoint
        full = full and self.mode != "off"
        if full:
            self._add(checkpoint, path, options)
        self._publish(checkpoint, path, write)
        if full:
            self._remove_old_side_files(path, checkpoint[KEY]["stem"])

    def _add(self, checkpoint: Tree, path: Any, options: Any) -> None:
        """Add state to ``checkpoint`` before it is written, and write these workers' side files."""
        host, workers, control = self.host, self.host.local_workers, self.host.control_loop
        engine = workers.first
        self._saves += not is_alone(self.host)
        save = f"{workers.run}-{'alone' if is_alone(self.host) else self._saves}"
        trainer = host.lightning_module.trainer
        turn = None
        if control is not None:
            turn = control.state_dict(trainer.callback_metrics, metrics_due(trainer))
        main: Tree = {
            "format": FORMAT,
            "mode": "full" if is_alone(self.host) else self.mode,
            "workers": engine.workers,
            "step": engine.step,
            "run": workers.run,
            "stem": side_files.stem_of(path, engine.step, save),
            "torn": engine.torn,
            "layout": [list(names) for names in workers.layout],
            "shapes": {
                name: {buffer: list(tensor.shape) for buffer, tensor in kept.items()}
                for name, kept in engine.buffers.named.items()
            },
            "configuration": configuration_of(self.host),
            "learning_rates": dict(engine.learning_rates.of_errors),
            "turn": turn,
            "files": [None] * engine.workers,
        }
        if workers.common:
            common = {name: part.common_state() for name, part in workers.common.items()}
            main["common"] = each_tensor(common, to_host)
        if main["torn"]:
            pass  # a round is incomplete: errors are neither those before nor after it
        elif main["mode"] == "mean":
            main |= self._mean()
        else:
            main["files"] = self._write_side_files(main, path, options)
        checkpoint[KEY] = main

    def _mean(self) -> Tree:
        """Return the mean of all workers' states."""
        host = self.host
        owns = [self.own(index) for index in range(len(host.local_workers.engines))]
        own = owns[0]
        if len(owns) > 1:
            own["averaged"] = average([each["averaged"] for each in owns])

        def mean(tensor: Tensor) -> Tensor:
            return host.reduce(tensor.to(host.root_device), reduce_op="mean").cpu()

        own["averaged"] = reduced(own["averaged"], mean)
        own["averaged"]["memory"] = self.small(own["averaged"]["memory"])
        return own

    def _write_side_files(self, main: Tree, path: Any, options: Any) -> list[str | None]:
        """Write this process's side files; return all workers' checksums, None where unknown."""
        acts: dict[int, Callable[[], str]] = {}
        for index, engine in enumerate(self.host.local_workers.engines):
            target = side_files.path_of(path, main["stem"], engine.worker, engine.workers)
            acts[engine.worker] = partial(self._save_own, index, main, target, options, path)
        checksums = together(self.host, acts)
        return [checksums.get(worker) for worker in range(main["workers"])]

    def _save_own(self, index: int, main: Tree, target: str, options: Any, path: Any) -> str:
        """Write one worker's side file and return its checksum; name the failed step in errors."""
        unsaved = f"so {path} is not written"
        taking = f"could not read its state, {unsaved}"
        own = explaining(taking, partial(self._content, index, main))()
        writing = f"could not write its state to {target}, {unsaved}"
        return explaining(writing, partial(self._write_side_file, own, target, options))()

    def _content(self, index: int, main: Tree) -> Tree:
        """Return the content of one worker's side file."""
        own = self.own(index)
        own["averaged"]["memory"] = self.small(own["averaged"]["memory"])
        alone = self.host.local_workers.own
        if alone:
            states = {name: parts[index].own_state() for name, parts in alone.items()}
            own["own"] = each_tensor(states, to_host)
        own |= {name: main[name] for name in ("format", "workers", "run", "stem")}
        own["worker"] = self.host.local_workers.engines[index].worker
        return with_checksum(own)

    def _write_side_file(self, own: Tree, target: str, options: Any) -> str:
        """Write one worker's side file; return its checksum."""
        io = self.host.checkpoint_io
        save = partial(io.save_checkpoint, own, storage_options=options)
        if wraps(io):
            save(target)
        else:
            write_atomically(target, save, io.remove_checkpoint)
        if not side_files.exists(target):
            io.teardown()  # waits for a CheckpointIO that writes in a thread
        if not side_files.exists(target):
            raise FileNotFoundError(
                f"{type(io).__name__} has not written the file; use a CheckpointIO that writes to "
                f"the given path, or state='mean'"
            )
        return str(own[CHECKSUM])

    def _publish(self, checkpoint: Tree, path: Any, write: Callable[[Any], None]) -> None:
        """Write the checkpoint by ``write``, atomically; if worker 0 fails, all workers raise."""
        host = self.host

        def act() -> str:
            if host.global_rank != 0:
                write(path)  # does nothing
                return ""
            if KEY in checkpoint:
                checkpoint[KEY] = with_checksum(checkpoint[KEY])
            if wraps(host.checkpoint_io):
                write(path)
            else:
                write_atomically(path, write, host.checkpoint_io.remove_checkpoint)
            return ""

        problem = f"could not write {path}; if there was one of that name, it is kept"
        together(self.host, {first_worker(self.host): explaining(problem, act)})

    def _remove_old_side_files(self, path: Any, stem: str) -> None:
        """Remove side files of older checkpoints that ``path`` has overwritten.

        An asynchronous CheckpointIO may not have written ``path`` yet, so the previous save's side
        files stay until the next save. The same thread has written ``path`` by then.
        """
        stems = self._stems.setdefault(str(path), [])
        stems.append(stem)
        del stems[: -2 if wraps(self.host.checkpoint_io) else -1]
        # When workers save alone, only worker 0 knows that there is a new checkpoint.
        if self.host.global_rank == 0 or (self.host.local_rank == 0 and not is_alone(self.host)):
            side_files.remove(path, keep=stems)

    def remove(self, path: Any) -> None:
        """Remove the side files of a checkpoint that has been removed."""
        if self.host.local_rank == 0:
            side_files.remove(path)

    def own(self, index: int = 0) -> Tree:
        """Return a copy of one worker's state in CPU memory."""
        workers = self.host.local_workers
        state = workers.engines[index].state_dict()
        averaged: Tree = {"memory": state["memory"]}
        averaged |= {name: kept[index].own_state() for name, kept in workers.kept.items()}
        own = {"averaged": averaged, "compressor": state["compressor"]}
        return each_tensor(own, lambda t: t.detach().cpu())

    def small(self, memory: Tree) -> Tree:
        """Return errors in the dtype for files."""
        return each_tensor(memory, lambda t: t.to(self.dtype))
