"""Sharded restoring: error state of a model in shards, on the mesh that it was saved on or another.

With as many replicas as before each gets its own errors, over any number of shards; with another
number each gets the mean, which keeps the mean over replicas, so that nothing is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.state_structure import ANYTHING, Record, Structure
from lightning_gc.strategies.checkpoint.host import KEY
from lightning_gc.strategies.checkpoint.restoring import Restoring
from lightning_gc.strategies.checkpoint.shard_tensors import put_back
from lightning_gc.strategies.checkpoint.sharded_saving import (
    FILE,
    FORMAT,
    MAIN,
    SHARDED,
    ShardedHost,
    file_of,
    folder_of,
    on_all_ranks,
)
from lightning_gc.strategies.checkpoint.validation import check_declared
from lightning_gc.synchronizer.checksum import NAME as CHECKSUM
from lightning_gc.synchronizer.checksum import check_checksum
from lightning_gc.synchronizer.joint_errors import explaining
from lightning_gc.synchronizer.pytree import Tree, average
from lightning_gc.transports.distributed import broadcast_text

_SINCE_EPOCH = "first"
"""The one number of a controller's statistics that is no sum over elements: a step."""


@dataclass(frozen=True)
class ShardedRestoring:
    """Restores what ``ShardedSaving`` has saved, or nothing.

    Args:
        host: the strategy.
        off: do not restore errors: they begin at zero.
    """

    host: ShardedHost
    off: bool

    def restore(self, checkpoint: Tree, path: Any) -> None:
        """Restore the engine, controller and other state, if there is an engine.

        Raises:
            RuntimeError: on all ranks, if one cannot use what it has read.
        """
        engines = self.host.local_workers.engines
        main: Any = checkpoint.get(KEY)
        if not engines:
            return
        target = Path(broadcast_text(str(path), self.host.root_device)).resolve()
        step = main.get("step", 0) if isinstance(main, dict) else 0
        if main is None or self.off or SHARDED not in main or main["torn"]:
            self._say_why_none(main, target)
            engines[0].reset(step if isinstance(step, int) else 0)
            if self.host.control_loop is not None:
                self.host.control_loop.begin_anew()
            return
        folder = folder_of(target, str(main.get("stem")))
        own: list[Tree] = []

        def check() -> str:
            self._check(main)
            own.append(self._read(main, folder))
            return f"{main['stem']} {main[CHECKSUM]}"

        problem = (
            f"could not use the error state in {folder}; nothing has been restored. Move a "
            f"checkpoint together with that folder, or give the strategy state='off', with which "
            f"errors begin at zero"
        )
        saves = on_all_ranks(self.host, explaining(problem, check))
        if len(set(saves.values())) > 1:
            raise RuntimeError(f"Ranks have found different checkpoints at {path}.")
        tensors = self.host.shard_tensors.load(folder)

        def apply() -> str:
            for path_, tensor in tensors.items():
                if not tensor.is_meta and not bool(tensor.isfinite().all()):
                    raise ValueError(f"{'/'.join(path_)} has NaN or infinity")
            # Of errors that fit no parameter the names are wanted, for a warning.
            fit = {p: t for p, t in tensors.items() if p[0] == "memory" or not t.is_meta}
            put_back(own[0]["averaged"], fit)
            return Restoring(self.host, off=False).apply(main, own)

        on_all_ranks(self.host, explaining(problem, apply))

    def _say_why_none(self, main: Any, target: Path) -> None:
        """Warn, or log, why errors begin at zero."""
        if self.off or self.host.global_rank != 0:
            return
        if main is not None and SHARDED not in main:
            warnings.warn(
                f"{target} holds errors of workers whose parameters were whole, which cannot be "
                f"shared out among ranks yet: errors begin at zero.",
                stacklevel=3,
            )
        elif main is not None:
            warnings.warn(f"{target} was saved within a step: errors begin at zero.", stacklevel=3)

    def _check(self, main: Tree) -> None:
        if main[SHARDED] > FORMAT:
            raise ValueError(
                f"it has format {main[SHARDED]}, but this version of lightning_gc knows formats up "
                f"to {FORMAT}; upgrade it"
            )
        check_checksum(main)
        MAIN.check(main)

    def _read(self, main: Tree, folder: Path) -> Tree:
        """Return what this rank resumes from, besides tensors in the shape of parameters."""
        (replicas, shards), (now, pieces) = main["mesh"], self.host.mesh_shape
        rank, shard = self.host.global_rank, self.host.local_workers.shard
        if (replicas, shards) == (now, pieces):
            return self._file(main, folder, rank)
        files = [self._file(main, folder, each) for each in range(replicas * shards)]
        averaged = average([file["averaged"] for file in files])
        if shards == pieces:  # all replicas have the same, of a shard
            return {"averaged": averaged, "compressor": files[shard]["compressor"]}
        if "turn" in averaged:
            averaged["turn"] = _shared_out(averaged["turn"], shards / pieces)
        if any(file["compressor"] for file in files) and rank == 0:
            warnings.warn(
                f"Resumed on {pieces} shards, saved on {shards}: the compressor's own state is of "
                f"shards and begins anew; errors are kept.",
                stacklevel=2,
            )
        return {"averaged": averaged, "compressor": {}}

    def _file(self, main: Tree, folder: Path, rank: int) -> Tree:
        replicas, shards = main["mesh"]
        path = file_of(folder, rank, replicas * shards)
        own: Tree = torch.load(path, map_location="cpu", weights_only=True)
        check_checksum(own)
        kept = self.host.local_workers.kept.items()
        structures: dict[str, Structure] = {name: parts[0].structure for name, parts in kept}
        averaged = Record(maybe=structures, others=ANYTHING)
        Record({**FILE, "averaged": averaged, "compressor": ENGINE_STATE["compressor"]}).check(own)
        expected = {"rank": rank, "run": main["run"], "stem": main["stem"]}
        for name, value in expected.items():
            if own[name] != value:
                raise ValueError(f"{path} has {name}={own[name]!r}, but its checkpoint {value!r}")
        if own[CHECKSUM] != main["files"][rank]:
            raise ValueError(f"{path} is not the file that was saved with its checkpoint")
        if shards == self.host.mesh_shape[1] and rank % shards == self.host.local_workers.shard:
            check_declared(own, main, self.host.local_workers)
        return own


def _shared_out(sums: Tree, share: float, leave: Iterable[str] = (_SINCE_EPOCH,)) -> Tree:
    """Return sums over elements for ranks that have ``share`` times as many."""
    out: Tree = {}
    for name, value in sums.items():
        if isinstance(value, dict):
            out[name] = _shared_out(value, share, leave)
        else:
            out[name] = value if name in leave else value * share
    return out
