"""Save error state of a sharded model in a folder with one file per rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.host import KEY, Host, configuration_of, on_all_ranks
from lightning_gc.checkpoint.recorded_files import LAST, record_files
from lightning_gc.checkpoint.shard_tensors import (
    PART,
    Part,
    described,
    key_of,
    taken_out,
)
from lightning_gc.checkpoint.side_files import write_atomically
from lightning_gc.checkpoint.validation import FILE_NAME, SHARED
from lightning_gc.control.training_progress import metrics_due
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import with_checksum
from lightning_gc.core.pytree import Tree, each_tensor
from lightning_gc.core.state_structure import (
    COUNT,
    TEXT,
    WHOLE,
    Each,
    Leaf,
    Listed,
    Record,
    Structure,
)
from lightning_gc.exchange.peers import explaining
from lightning_gc.sharded.sharded_workers import ShardedWorkers
from lightning_gc.transports.distributed import broadcast_text

FORMAT = 2
"""Format 1 has tensors in a distributed checkpoint of torch, without checksums."""
SHARDED = "sharded"
TENSORS = "tensors"
_MESH = Leaf(
    "a number of replicas and one of shards",
    lambda v: (
        isinstance(v, list | tuple) and len(v) == 2 and all(type(n) is int and n > 0 for n in v)
    ),
)
MAIN = Record(
    {
        **SHARED,
        SHARDED: COUNT,  # the format
        "mesh": _MESH,
        "run": TEXT,
        "stem": FILE_NAME,
        "files": Listed(TEXT),
        CHECKSUM: TEXT,
    }
)
"""Structure of ``"lightning_gc"`` in a checkpoint of a sharded model."""
FILE: dict[str, Structure] = {
    SHARDED: COUNT,
    "rank": WHOLE,
    "run": TEXT,
    "stem": TEXT,
    CHECKSUM: TEXT,
}
FILE_SINCE_2: dict[str, Structure] = {"parts": Each(PART)}
"""The parts of ``TENSORS``, the file's last entry; each part has its tensor's checksum.

A rank that needs some of another rank's tensors reads and checks only these.
"""


class ShardedHost(Host):
    """Attributes of a Lightning strategy for sharded models that saving and restoring use."""

    local_workers: ShardedWorkers
    distributed_form: bool  # a checkpoint is a folder
    mesh_shape: tuple[int, int]
    replicate_group: Any
    shard_parts: dict[str, Part]
    way_out: str
    barrier: Callable[..., None]


def folder_of(path: Path, stem: str) -> Path:
    """Return the folder of one save's error state, in ``state_folder``."""
    return state_folder(path) / stem


def state_folder(path: Path) -> Path:
    """Return the folder with the error state of all saves of a checkpoint.

    It is inside a checkpoint that is a folder, so that both are moved together. Otherwise it is
    next to the checkpoint.
    """
    return (path if path.is_dir() else path.parent) / side_files.FOLDER


def file_of(folder: Path, rank: int, ranks: int) -> Path:
    """Return the path of one rank's file."""
    return folder / f"rank{rank}of{ranks}.pt"


@dataclass
class ShardedSaving:
    """Save the engine, controller and other state of every rank (``Workers.kept``).

    The checkpoint gets the state that is equal on all ranks, under ``"lightning_gc"``. Each rank
    writes its own file: ``{"sharded", "rank", "run", "stem", "averaged", "compressor", "parts",
    "sha256", "tensors"}``. ``"tensors"`` are its parts of parameter-shaped tensors, which any mesh
    can read. The files are in a new folder (``folder_of``), which is complete before the checkpoint
    that names it is written. If the checkpoint is a folder too, its files' checksums follow.

    Args:
        host: the strategy.
        mode: as in ``CompressedHSDPStrategy(state=...)``.
        dtype: dtype of errors in files. In use they are float32.
    """

    host: ShardedHost
    mode: Literal["full", "mean", "off"]
    dtype: torch.dtype
    _saves: int = 0

    def save(self, checkpoint: Tree, path: Any, options: Any, write: Callable[[Any], None]) -> None:
        """Write the error state of a full checkpoint, then the checkpoint by ``write``."""
        host = self.host
        target = Path(broadcast_text(os.fspath(path), host.root_device))
        engines = host.local_workers.engines
        full = bool(engines) and "optimizer_states" in checkpoint and self.mode != "off"
        stem = self._add(checkpoint, target) if full else ""
        if host.distributed_form:
            self._withdraw(target)
            write(target)
            if full:
                record_files(host, target, folder_of(target, stem))
        elif host.global_rank == 0:
            # Other ranks use the path that rank 0 broadcasts.
            write_atomically(target, write, host.checkpoint_io.remove_checkpoint)
        else:
            write(target)
        if (full or host.distributed_form) and host.global_rank == 0:
            remove(target, keep=stem)

    def _withdraw(self, target: Path) -> None:
        """Invalidate an old checkpoint of that name before its files are overwritten one by one.

        A kill could otherwise leave new weights with old counters. Lightning writes ``LAST`` last.
        """
        if self.host.global_rank == 0:
            (target / LAST).unlink(missing_ok=True)
        self.host.barrier()

    def _add(self, checkpoint: Tree, target: Path) -> str:
        host, workers, control = self.host, self.host.local_workers, self.host.control_loop
        engine = workers.first
        self._saves += 1
        stem = side_files.stem_of(target, engine.step, f"{workers.run}-{self._saves}")
        trainer = host.lightning_module.trainer
        turn = None
        if control is not None:
            turn = control.state_dict(trainer.callback_metrics, metrics_due(trainer))
        main: Tree = {
            SHARDED: FORMAT,
            "mode": self.mode,
            "mesh": list(host.mesh_shape),
            "step": engine.step,
            "run": workers.run,
            "stem": stem,
            "torn": engine.torn,
            "layout": [],
            "configuration": configuration_of(host),
            "learning_rates": dict(engine.learning_rates.of_errors),
            "turn": turn,
            "files": [],
        }
        if not main["torn"]:  # within a round errors are neither the old nor the new ones
            main["files"] = self._write(main, target)
        checkpoint[KEY] = with_checksum(main)
        return stem

    def _write(self, main: Tree, target: Path) -> list[str]:
        """Write errors and this rank's file; return the checksums of all ranks' files."""
        host = self.host
        if host.distributed_form:
            if host.global_rank == 0:
                if target.is_file():
                    target.unlink()
                target.mkdir(parents=True, exist_ok=True)
            host.barrier()
        folder = folder_of(target, main["stem"])
        tensors, rest = taken_out(self._averaged(), host.local_workers.shapes)
        if self.mode == "mean":
            mean = partial(host.reduce, group=host.replicate_group, reduce_op="mean")
            tensors = {path: mean(t.float().clone()) for path, t in tensors.items()}
            if host.global_rank >= host.mesh_shape[1]:
                tensors = {}  # the first replica's ranks write the mean
        small = {
            path: t.to("cpu", self.dtype if path[0] == "memory" else t.dtype).clone()
            for path, t in tensors.items()
        }

        def act() -> str:
            own = {
                "averaged": each_tensor(rest, lambda t: t.detach().cpu()),
                "compressor": each_tensor(
                    host.local_workers.first.state_dict()["compressor"], lambda t: t.detach().cpu()
                ),
                "parts": {key_of(p): described(p, t, host.shard_parts) for p, t in small.items()},
                "rank": host.global_rank,
                **{name: main[name] for name in (SHARDED, "run", "stem")},
            }
            own = with_checksum(own)
            folder.mkdir(parents=True, exist_ok=True)
            with file_of(folder, host.global_rank, host.world_size).open("wb") as file:
                torch.save(own | {TENSORS: {key_of(p): t for p, t in small.items()}}, file)
                file.flush()
                os.fsync(file.fileno())
            return str(own[CHECKSUM])

        problem = f"could not write its part of the error state to {folder}"
        checksums = on_all_ranks(host, explaining(problem, act))
        return [checksums[rank] for rank in range(host.world_size)]

    def _averaged(self) -> Tree:
        """Return the state that may be averaged over replicas; errors stay on their device."""
        workers = self.host.local_workers
        named = workers.first.buffers.named
        buffers = workers.first.memory.buffers if named else ()
        memory: Tree = {}
        for param, name in workers.names.items():
            kept = named.get(name, {})
            memory[name] = {b: self._of(kept, b, workers.local(param)) for b in buffers}
        averaged: Tree = {"memory": memory}
        return averaged | {name: kept[0].own_state() for name, kept in workers.kept.items()}

    @staticmethod
    def _of(kept: Any, buffer: str, local: Tensor) -> Tensor:
        """Return a parameter's buffer, or zeros where nothing is kept, as for an empty shard."""
        if buffer in kept:
            found: Tensor = kept[buffer].detach()
            return found
        return torch.zeros_like(local, dtype=torch.float32).detach()

    def remove(self, path: Any) -> None:
        """Remove the error state of a checkpoint that has been removed."""
        if self.host.global_rank == 0:
            remove(Path(path))


def remove(path: Path, keep: str = "") -> None:
    """Remove the folders of a checkpoint's error state, except the folder ``keep``."""
    parent = state_folder(path)
    if not parent.is_dir():
        return
    for each in parent.iterdir():
        if side_files.belongs_to(path, each.name) and each.name != keep:
            shutil.rmtree(each, ignore_errors=True)
    side_files.tidy(path)
