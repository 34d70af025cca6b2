"""Restore error state of a sharded model, on the same mesh or another one.

With as many replicas as saved, each replica gets its own errors, over any number of shards. With
another number each gets the mean: the mean over replicas stays the same, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gc.checkpoint.host import KEY, on_all_ranks
from lightning_gc.checkpoint.recorded_files import LAST, check_files
from lightning_gc.checkpoint.restoring import Restoring
from lightning_gc.checkpoint.shard_tensors import (
    Assembly,
    Part,
    add_format_1,
    path_of,
    put_back,
)
from lightning_gc.checkpoint.sharded_saving import (
    FILE,
    FILE_SINCE_2,
    FORMAT,
    MAIN,
    SHARDED,
    TENSORS,
    ShardedHost,
    file_of,
    folder_of,
    state_folder,
)
from lightning_gc.checkpoint.side_files import in_short
from lightning_gc.checkpoint.validation import check_declared
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import check_checksum, checksum
from lightning_gc.core.pytree import Tree, average, each_tensor
from lightning_gc.core.state_structure import ANYTHING, COUNT, FLOATS, Record, Structure
from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.exchange.peers import explaining
from lightning_gc.transports.distributed import broadcast_text

_SINCE_EPOCH = "first"
"""The only controller statistic that is not summed over elements: the first step."""

_UNREAD = object()


@dataclass(frozen=True)
class ShardedRestoring:
    """Restore the state that ``ShardedSaving`` has saved, completely or not at all.

    Args:
        host: the strategy.
        off: do not restore; errors begin at zero.
    """

    host: ShardedHost
    off: bool

    def load(
        self, path: Any, weights_only: bool | None, fit: bool, load: Callable[[], Tree]
    ) -> Tree:
        """Load a checkpoint by ``load``; in a fit restore the engine, controller and other state.

        All ranks check all files before any rank changes anything.

        Args:
            path: path of the checkpoint.
            weights_only: as given to the Trainer. torch may unpickle objects only with False.
            fit: whether a fit begins.
            load: loads weights and optimizers, by Lightning.

        Raises:
            RuntimeError: on all ranks, if one cannot use its files.
        """
        target = Path(broadcast_text(str(path), self.host.root_device))
        self._check_files(target, weights_only)
        if not fit or not self.host.local_workers.engines:
            return load()
        main = self._peek(target, weights_only)
        if main is not _UNREAD:
            found = self._read_and_compare(main, target)
        loaded = load()
        if main is _UNREAD:
            main = loaded.get(KEY)
            found = self._read_and_compare(main, target)
        if found:
            apply = partial(Restoring(self.host, off=False).apply, main, found)
            problem = f"could not restore the error state of {target}"
            on_all_ranks(self.host, explaining(problem, apply))
        else:
            self._begin_at_zero(main, target)
        return loaded

    def _check_files(self, target: Path, weights_only: bool | None) -> None:
        """Check the files of a distributed checkpoint, before Lightning loads any of them."""

        def check() -> str:
            safely = weights_only is not False
            return str(check_files(self.host, target, recorded=not self.off, safely=safely))

        unrecorded = on_all_ranks(self.host, explaining(self._problem(target), check))
        if self.host.global_rank == 0 and "True" in unrecorded.values():
            warnings.warn(
                f"{target} has no checksums of its weights, so file damage is not detected. "
                f"Earlier versions saved no checksums, and an interrupted save leaves none.",
                stacklevel=4,
            )

    def _peek(self, target: Path, weights_only: bool | None) -> Any:
        """Return our part of a checkpoint before Lightning loads the rest.

        Return ``_UNREAD`` if the file has objects of other classes and the user trusts it.
        """
        file = target / LAST if target.is_dir() else target
        main: Any = None

        def read() -> str:
            nonlocal main
            if not file.is_file():
                return ""  # Lightning raises for it
            try:
                saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:
                if weights_only is False:
                    return "unread"
                named = re.search(r"GLOBAL (\S+)", str(error))
                what = f"it names {named[1]}" if named else in_short(error)
                raise ValueError(
                    f"{file} cannot be read with weights_only=True: {what}. If you trust this "
                    f"file, give Trainer.fit(..., weights_only=False)"
                ) from error
            main = saved.get(KEY) if isinstance(saved, dict) else None
            return ""

        said = on_all_ranks(self.host, explaining(self._problem(target), read))
        return _UNREAD if any(said.values()) else main

    def _problem(self, target: Path) -> str:
        return (
            f"could not use the checkpoint {target}; nothing has been restored. Restore the file, "
            f"or {self.host.way_out}"
        )

    def _read_and_compare(self, main: Any, target: Path) -> list[Tree]:
        """Return the state for this rank; raise on all ranks if one cannot read its own."""
        target = target.resolve()
        found: list[Tree] = []

        def check() -> str:
            if main is None or self.off or (isinstance(main, dict) and SHARDED not in main):
                return ""
            self._check(main)
            if not main["torn"]:
                found.append(self._read(main, folder_of(target, main["stem"])))
            return f"{main['stem']} {main[CHECKSUM]}"

        problem = (
            f"could not use the error state in {state_folder(target)}; nothing has been restored. "
            f"Move a checkpoint together with that folder, or {self.host.way_out}"
        )
        saves = on_all_ranks(self.host, explaining(problem, check))
        if len(set(saves.values())) > 1:
            raise RuntimeError(f"Ranks have found different checkpoints at {target}.")
        return found

    def _begin_at_zero(self, main: Any, target: Path) -> None:
        """Reset errors and controller, and continue from the saved step."""
        self._say_why_none(main, target)
        step = main.get("step", 0) if isinstance(main, dict) else 0
        self.host.local_workers.first.reset(step if isinstance(step, int) else 0)
        if self.host.control_loop is not None:
            self.host.control_loop.begin_anew()

    def _say_why_none(self, main: Any, target: Path) -> None:
        """Warn why errors begin at zero."""
        if self.off or self.host.global_rank != 0:
            return
        if main is not None and SHARDED not in main:
            warnings.warn(
                f"{target} holds errors of workers with unsharded parameters, which cannot be "
                f"distributed among ranks yet: errors begin at zero.",
                stacklevel=3,
            )
        elif main is not None:
            warnings.warn(f"{target} was saved within a step: errors begin at zero.", stacklevel=3)

    def _check(self, main: Any) -> None:
        if not isinstance(main, dict):
            raise ValueError(f"the checkpoint has a {type(main).__name__} where a dict was saved")
        COUNT.check(main[SHARDED], SHARDED)
        if main[SHARDED] > FORMAT:
            raise ValueError(
                f"it has format {main[SHARDED]}, but this version of lightning_gc knows formats up "
                f"to {FORMAT}; upgrade it"
            )
        check_checksum(main)
        MAIN.check(main)
        replicas, shards = main["mesh"]
        if len(main["files"]) != (0 if main["torn"] else replicas * shards):
            raise ValueError(f"it has {len(main['files'])} files of {replicas * shards} ranks")

    def _read(self, main: Tree, folder: Path) -> Tree:
        """Return the state for this rank; read one file at a time, as they may be large."""
        (replicas, shards), (now, pieces) = main["mesh"], self.host.mesh_shape
        rank, shard = self.host.global_rank, self.host.local_workers.shard
        written = 1 if main["mode"] == "mean" else replicas
        source = range(rank // pieces, rank // pieces + 1) if written == now else range(written)
        assembly = Assembly(self.host.shard_parts, source)
        same = (replicas, shards) == (now, pieces)
        own = {rank} if same else set(range(replicas * shards))
        holders = {r * shards + s for r in source for s in ([shard] if same else range(shards))}
        files = {}
        for each in sorted(own | (holders if main[SHARDED] > 1 else set())):
            file = self._file(main, folder, each)
            tensors = file.pop(TENSORS, None)
            if each in holders and main[SHARDED] > 1:
                path = file_of(folder, each, replicas * shards)
                with _named(path):
                    _add(assembly, file["parts"], tensors, each // shards, written)
            if each in own:
                files[each] = each_tensor(
                    {name: file[name] for name in ("averaged", "compressor")}, Tensor.clone
                )
        if main[SHARDED] == 1:
            add_format_1(assembly, folder, source)
        found = assembly.mean()
        if same:
            state = files[rank]
        else:
            state = self._shared(files, (replicas, shards))
        # Keep the names of errors that match no parameter, for the warning.
        fit = {p: t for p, t in found.items() if p[0] == "memory" or not t.is_meta}
        put_back(state["averaged"], fit)
        return state

    def _shared(self, files: Mapping[int, Tree], mesh: tuple[int, int]) -> Tree:
        """Return this rank's share of the state that another mesh's ranks have saved."""
        (replicas, shards), (_, pieces) = mesh, self.host.mesh_shape
        rank, shard = self.host.global_rank, self.host.local_workers.shard
        averaged = average([files[each]["averaged"] for each in range(replicas * shards)])
        if shards == pieces:  # all replicas have the same state of a shard
            return {"averaged": averaged, "compressor": files[shard]["compressor"]}
        if "turn" in averaged:
            averaged["turn"] = _shared_out(averaged["turn"], shards / pieces)
        if any(file["compressor"] for file in files.values()) and rank == 0:
            warnings.warn(
                f"Resumed on {pieces} shards, saved on {shards}: errors are kept, but the "
                f"compressor's own state is reset, because it belongs to the saved shards.",
                stacklevel=2,
            )
        return {"averaged": averaged, "compressor": {}}

    def _file(self, main: Tree, folder: Path, rank: int) -> Tree:
        """Return a rank's file, checked except for its tensors, which stay on disk."""
        replicas, shards = main["mesh"]
        path = file_of(folder, rank, replicas * shards)
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        with _named(path):
            own: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(own, dict):
                raise ValueError(f"it holds a {type(own).__name__} where a dict was saved")
            tensors = own.pop(TENSORS, None)
            check_checksum(own)
            kept = self.host.local_workers.kept.items()
            structures: dict[str, Structure] = {name: parts[0].structure for name, parts in kept}
            averaged = Record(maybe=structures, others=ANYTHING)
            since = FILE_SINCE_2 if main[SHARDED] > 1 else {}
            rest = {"averaged": averaged, "compressor": ENGINE_STATE["compressor"]}
            Record({**FILE, **since, **rest}).check(own)
            same = {name: main[name] for name in (SHARDED, "run", "stem")}
            for name, value in {"rank": rank, **same}.items():
                if own[name] != value:
                    raise ValueError(f"it has {name}={own[name]!r}, but its checkpoint {value!r}")
            if own[CHECKSUM] != main["files"][rank]:
                raise ValueError("it is not the file that was saved with its checkpoint")
            if shards == self.host.mesh_shape[1] and rank % shards == self.host.local_workers.shard:
                check_declared(own, main, self.host.local_workers)
        return own | {TENSORS: tensors}


def _add(assembly: Assembly, parts: Tree, tensors: Any, replica: int, saved: int) -> None:
    """Add the parts in a file; check each part when it is loaded."""
    for key, about in parts.items():
        part = Part(*(tuple(about[name]) for name in Part._fields))

        def load(key: str = key, about: Tree = about) -> Tensor:
            tensor: Tensor = tensors[key]
            FLOATS.check(tensor, key)
            if checksum(tensor) != about[CHECKSUM]:
                raise ValueError(f"{key} does not have the checksum that it was saved with")
            return tensor

        assembly.add(path_of(key), part, replica, saved, load)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn any exception of the block into a ValueError that names the file.

    torch raises many classes for a damaged file.
    """
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else in_short(error)
        raise ValueError(f"{path} cannot be used: {why}") from error


def _shared_out(sums: Tree, share: float, leave: Iterable[str] = (_SINCE_EPOCH,)) -> Tree:
    """Scale sums over elements to ranks with ``share`` times as many elements."""
    out: Tree = {}
    for name, value in sums.items():
        if isinstance(value, dict):
            out[name] = _shared_out(value, share, leave)
        else:
            out[name] = value if name in leave else value * share
    return out
