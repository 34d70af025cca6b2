"""Shards: save and restore error state of a sharded model, in a folder with one file per rank.

A parameter of shape ``(n, ...)`` has an error of that shape in each replica, and replicas' errors
differ. Each rank saves its part. With as many replicas as saved, each replica gets its own errors,
over any number of shards. With another number each gets the mean: the mean over replicas stays the
same, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.distributed_files import (
    LAST,
    check_files,
    record_files,
)
from lightning_gc.checkpoint.worker_state import (
    CONTROLLER,
    FILE_NAME,
    SHARED,
    SavedDict,
    WorkerState,
    check_same,
    on_host,
)
from lightning_gc.core import ANYTHING, TEXT, WHOLE, Each, Leaf, Listed, Record
from lightning_gc.core.saved_state import (
    CHECKSUM,
    FLOATS,
    Tree,
    average,
    checksum,
    each_tensor,
    with_checksum,
)

SHARDED = "sharded"
TENSORS = "tensors"
_MESH = Leaf(
    "a number of replicas, one of shards, and maybe one of tensor-parallel ranks",
    lambda v: (
        isinstance(v, list | tuple)
        and len(v) in (2, 3)
        and all(type(n) is int and n > 0 for n in v)
    ),
)
_SHAPE = Listed(WHOLE)
_ABOUT = Record({"shape": _SHAPE, "offsets": _SHAPE, "sizes": _SHAPE, CHECKSUM: TEXT})
MAIN = SavedDict(
    SHARED | {"mesh": _MESH, "run": TEXT, "stem": FILE_NAME, "files": Listed(TEXT)}, key=SHARDED
)
"""Structure of ``"lightning_gc"`` in a checkpoint of a sharded model."""
# The parts of TENSORS, the file's last entry; each part has its tensor's checksum. A rank that
# needs some of another rank's tensors reads and checks only these.
FILE = SavedDict({"rank": WHOLE, "run": TEXT, "stem": TEXT, "parts": Each(_ABOUT)}, key=SHARDED)
_UNREAD = object()
_SINCE_EPOCH = "first"  # the only controller statistic that is not a sum over elements: a step

Path_ = tuple[str, ...]
"""Path of a tensor in a tree of nested dicts; one of its names is a parameter's."""

Shape = tuple[int, ...]
Mesh = tuple[int, int, int]
"""R replicas, S shards of each, T tensor-parallel ranks of each shard; T varies fastest."""
_T = TypeVar("_T")


class ShardPart(NamedTuple):
    """A part of a parameter: the parameter's global shape, the part's offsets and shape."""

    shape: Shape
    offsets: Shape
    sizes: Shape


class ShardedHost(side_files.Host):
    """Attributes of a Lightning strategy for sharded models that saving and restoring use."""

    distributed_form: bool  # a checkpoint is a folder
    mesh_shape: Mesh
    replicate_group: Any
    shard_parts: dict[str, ShardPart]
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
class ShardStore:
    """Save the state of every rank, and restore it completely or not at all.

    The checkpoint gets the shared state under ``"lightning_gc"`` (``MAIN``). Each rank writes its
    own file (``FILE``) with ``"averaged"`` and ``"compressor"``. Its last entry ``"tensors"`` has
    the rank's parts of parameter-shaped tensors, which any mesh can read. The files are in a new
    folder (``folder_of``), which is complete before the checkpoint that names it is written. If the
    checkpoint is a folder too, its files' checksums follow.

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
        target = Path(side_files.told_by_rank_0(host, os.fspath(path)))

        def write_named(where: Any) -> None:
            with side_files.writing(target):
                write(where)

        engines = host.checkpoint_parts.workers.engines
        full = bool(engines) and "optimizer_states" in checkpoint and self.mode != "off"
        if full:
            checkpoint[side_files.KEY] = self._state(target)
        stem = checkpoint[side_files.KEY]["stem"] if full else ""
        if host.distributed_form:
            self._withdraw(target)
            write_named(target)
            if full:
                record_files(host, target, folder_of(target, stem))
        elif host.global_rank == 0:
            # Other ranks use the path that rank 0 broadcasts.
            side_files.write_atomically(target, write_named, host.checkpoint_io.remove_checkpoint)
        else:
            write_named(target)
        if full or host.distributed_form:
            self.remove(target, keep=stem)

    def _withdraw(self, target: Path) -> None:
        """Invalidate an old checkpoint of that name before its files are overwritten one by one.

        A kill could otherwise leave new weights with old counters. Lightning writes ``LAST`` last.
        """
        if self.host.global_rank == 0:
            (target / LAST).unlink(missing_ok=True)
        self.host.barrier()

    def _state(self, target: Path) -> Tree:
        """Return the shared state; write this rank's file."""
        self._saves += 1
        shared = self.host.checkpoint_parts.shared_state(*self.host.metrics())
        save = f"{shared['run']}-{self._saves}"
        main: Tree = shared | {
            MAIN.key: MAIN.format,
            "mode": self.mode,
            "mesh": list(self.host.mesh_shape),
            "stem": side_files.stem_of(target, shared["step"], save),
            "layout": [],
            "files": [],
        }
        if not main["torn"]:  # within a round errors are neither the old nor the new ones
            main["files"] = self._write(main, target)
        return with_checksum(main)

    def _write(self, main: Tree, target: Path) -> list[str]:
        """Write errors and this rank's file; return the checksums of all ranks' files."""
        host, parts = self.host, self.host.checkpoint_parts
        if host.distributed_form:
            if host.global_rank == 0:
                if target.is_file():
                    target.unlink()
                target.mkdir(parents=True, exist_ok=True)
            host.barrier()
        folder = folder_of(target, main["stem"])
        tensors, rest = taken_out(self._averaged(), parts.workers.shapes)
        if self.mode == "mean":
            mean = partial(host.reduce, group=host.replicate_group, reduce_op="mean")
            tensors = {path: mean(t.float().clone()) for path, t in tensors.items()}
            if host.global_rank >= math.prod(host.mesh_shape[1:]):
                tensors = {}  # the first replica's ranks write the mean
        small = {
            path: t.to("cpu", self.dtype if path[0] == "memory" else t.dtype).clone()
            for path, t in tensors.items()
        }

        alone = on_host(parts.own_state())

        def act() -> str:
            own = {
                "averaged": on_host(rest),
                "compressor": on_host(parts.workers.first.state_dict()["compressor"]),
                "parts": {json.dumps(p): _about(p, t, host.shard_parts) for p, t in small.items()},
                "rank": host.global_rank,
                **{name: main[name] for name in (FILE.key, "run", "stem")},
            }
            if alone:
                own["own"] = alone
            own = with_checksum(own)
            folder.mkdir(parents=True, exist_ok=True)
            path = file_of(folder, host.global_rank, host.world_size)
            with side_files.writing(path), path.open("wb") as file:
                torch.save(own | {TENSORS: {json.dumps(p): t for p, t in small.items()}}, file)
                file.flush()
                os.fsync(file.fileno())
            return str(own[CHECKSUM])

        problem = f"could not write its part of the error state to {folder}"
        checksums = side_files.on_all_ranks(host, problem, act)
        return [checksums[rank] for rank in range(host.world_size)]

    def _averaged(self) -> Tree:
        """Return the state that may be averaged over replicas; errors stay on their device.

        A parameter's buffer is zero where nothing is kept, as for an empty shard.
        """
        workers = self.host.checkpoint_parts.workers
        named = workers.first.kept
        memory: Tree = {}
        for param, name in workers.names.items():
            kept, shape = named.get(name, {}), workers.shapes[name]
            memory[name] = {
                buffer: kept[buffer].detach()
                if buffer in kept
                else torch.zeros(shape, dtype=torch.float32, device=param.device)
                for buffer in (workers.first.memory.buffers if named else ())
            }
        return {"memory": memory} | self.host.checkpoint_parts.averaged_state()

    def remove(self, path: Any, keep: str = "") -> None:
        """Remove the folders of a checkpoint's error state, except the folder ``keep``."""
        parent = state_folder(Path(path))
        if self.host.global_rank != 0 or not parent.is_dir():
            return
        for each in parent.iterdir():
            if side_files.belongs_to(path, each.name) and each.name != keep:
                shutil.rmtree(each, ignore_errors=True)
        side_files.tidy(path)

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
        host = self.host
        target = Path(side_files.told_by_rank_0(host, str(path)))
        self._check_files(target, weights_only)
        if not fit or not host.checkpoint_parts.workers.engines:
            return load()
        main = self._peek(target, weights_only)
        if main is not _UNREAD:
            states = self._agreed(main, target)
        loaded = load()
        if main is _UNREAD:
            main = loaded.get(side_files.KEY)
            states = self._agreed(main, target)
        if states:
            problem, says = f"could not restore the error state of {target}", host.global_rank == 0
            act = partial(host.checkpoint_parts.apply, states, host.root_device, says)
            side_files.on_all_ranks(host, problem, act)
        else:
            self._say_why_none(main, target)
            host.checkpoint_parts.begin_at_zero(main)
        return loaded

    def _check_files(self, target: Path, weights_only: bool | None) -> None:
        """Check the files of a distributed checkpoint, before Lightning loads any of them."""

        def check() -> str:
            safely = weights_only is not False
            return str(check_files(self.host, target, recorded=self.mode != "off", safely=safely))

        unrecorded = side_files.on_all_ranks(self.host, self._problem(target), check)
        if self.host.global_rank == 0 and "True" in unrecorded.values():
            warnings.warn(
                f"{target} has no checksums of its weights, so file damage is not detected. "
                f"A save that was interrupted leaves none.",
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
                what = f"it names {named[1]}" if named else side_files.in_short(error)
                raise ValueError(
                    f"{file} cannot be read with weights_only=True: {what}. If you trust this "
                    f"file, give Trainer.fit(..., weights_only=False)"
                ) from error
            main = saved.get(side_files.KEY) if isinstance(saved, dict) else None
            return ""

        said = side_files.on_all_ranks(self.host, self._problem(target), read)
        return _UNREAD if any(said.values()) else main

    def _problem(self, target: Path) -> str:
        return (
            f"could not use the checkpoint {target}; nothing has been restored. Restore the file, "
            f"or {self.host.way_out}"
        )

    def _agreed(self, main: Any, target: Path) -> list[WorkerState]:
        """Return the state for this rank; raise on all ranks if one cannot read its own."""
        target = target.resolve()
        states: list[WorkerState] = []

        def check() -> str:
            others = isinstance(main, dict) and SHARDED not in main
            if main is None or self.mode == "off" or others:
                return ""
            opened = MAIN.opened(main)
            self.host.checkpoint_parts.check_levels(opened)
            ranks = math.prod(opened["mesh"])
            if len(opened["files"]) != (0 if opened["torn"] else ranks):
                raise ValueError(f"it has {len(opened['files'])} files of {ranks} ranks")
            if not opened["torn"]:
                states.append(self._read(opened, folder_of(target, opened["stem"])))
            return f"{opened['stem']} {opened[CHECKSUM]}"

        problem = (
            f"could not use the error state in {state_folder(target)}; nothing has been restored. "
            f"Move a checkpoint together with that folder, or {self.host.way_out}"
        )
        saves = side_files.on_all_ranks(self.host, problem, check)
        if len(set(saves.values())) > 1:
            raise RuntimeError(f"Ranks have found different checkpoints at {target}.")
        return states

    def _say_why_none(self, main: Any, target: Path) -> None:
        """Warn why errors begin at zero."""
        if self.mode == "off" or self.host.global_rank != 0:
            return
        if main is not None and SHARDED not in main:
            warnings.warn(
                f"{target} holds errors of workers with unsharded parameters, which cannot be "
                f"distributed among ranks yet: errors begin at zero.",
                stacklevel=3,
            )
        elif main is not None:
            warnings.warn(f"{target} was saved within a step: errors begin at zero.", stacklevel=3)

    def _read(self, main: Tree, folder: Path) -> WorkerState:
        """Return the state for this rank; read one file at a time, as they may be large."""
        mesh, now = _mesh(main), self.host.mesh_shape
        (replicas, shards), (_, pieces) = _ranks(mesh), _ranks(now)
        rank = self.host.global_rank
        shard = rank % pieces
        written = 1 if main["mode"] == "mean" else replicas
        own_replica = range(rank // pieces, rank // pieces + 1)
        source = own_replica if written == now[0] else range(written)
        assembly = Assembly(self.host.shard_parts, source)
        same = mesh == now
        own = {rank} if same else set(range(replicas * shards))
        holders = {r * shards + s for r in source for s in ([shard] if same else range(shards))}
        states = {}
        for each in sorted(own | holders):
            path = file_of(folder, each, replicas * shards)
            with side_files.reading(path):
                file = self._file(main, folder, each)
                tensors = file.pop(TENSORS, None)
                if each in holders:
                    with _named(path):
                        _add(assembly, file["parts"], tensors, each // shards, written)
            if each in own:
                averaged, compressor = (
                    each_tensor(file[name], Tensor.clone) for name in ("averaged", "compressor")
                )
                kept = {"compressor": compressor}
                if same and "own" in file:
                    kept["own"] = each_tensor(file["own"], Tensor.clone)
                states[each] = WorkerState(main, averaged, (kept,))
        found = assembly.mean()
        state = states[rank] if same else self._shared_out(states, mesh)
        # Keep the names of errors that match no parameter, for the warning.
        fit = {p: t for p, t in found.items() if p[0] == "memory" or not t.is_meta}
        put_back(state.averaged, fit)
        return state

    def _shared_out(self, states: Mapping[int, WorkerState], mesh: Mesh) -> WorkerState:
        """Return this rank's share of the state that another mesh's ranks have saved."""
        now = self.host.mesh_shape
        (replicas, shards), (_, pieces) = _ranks(mesh), _ranks(now)
        shard, first = self.host.global_rank % pieces, states[0]
        averaged = average([states[each].averaged for each in range(replicas * shards)])
        if mesh[1:] == now[1:]:  # all replicas have the same state of a shard
            return WorkerState(first.shared, averaged, states[shard].own)
        if CONTROLLER in averaged:
            averaged[CONTROLLER] = _scaled(averaged[CONTROLLER], shards / pieces)
        if any(each.own[0]["compressor"] for each in states.values()) and (
            self.host.global_rank == 0
        ):
            warnings.warn(
                f"Resumed on {_in_words(now)}, saved on {_in_words(mesh)}: errors are kept, but "
                f"the compressor's own state is reset, because it belongs to the saved shards.",
                stacklevel=2,
            )
        return WorkerState(first.shared, averaged, ({"compressor": {}},))

    def _file(self, main: Tree, folder: Path, rank: int) -> Tree:
        """Return a rank's file, checked except for its tensors, which stay on disk."""
        mesh, now = _mesh(main), self.host.mesh_shape
        replicas, shards = _ranks(mesh)
        parts = self.host.checkpoint_parts
        path = file_of(folder, rank, replicas * shards)
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        with _named(path):
            saved: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            tensors = saved.pop(TENSORS, None) if isinstance(saved, dict) else None
            own = FILE.opened(
                saved,
                parts.structure,
                {"own": Record(maybe=parts.own_structure, others=ANYTHING)},
            )
            check_same(own, {"rank": rank} | {n: main[n] for n in (FILE.key, "run", "stem")})
            if own[CHECKSUM] != main["files"][rank]:
                raise ValueError("it is not the file that was saved with its checkpoint")
            if mesh[1:] == now[1:] and rank % shards == self.host.global_rank % shards:
                parts.check_own(own, main)
        return own | {TENSORS: tensors}


def _mesh(main: Tree) -> Mesh:
    """Return the mesh of the ranks that have saved; without T in the file it is 1."""
    replicas, shards, *more = main["mesh"]
    return replicas, shards, more[0] if more else 1


def _ranks(mesh: Mesh) -> tuple[int, int]:
    """Return the number of replicas, and of the ranks of each."""
    replicas, shards, tensor_ranks = mesh
    return replicas, shards * tensor_ranks


def _in_words(mesh: Mesh) -> str:
    _, shards, tensor_ranks = mesh
    return f"{shards} shards" + f" x {tensor_ranks} tensor-parallel ranks" * (tensor_ranks > 1)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn any exception of the block into a ValueError that names the file.

    torch raises many classes for a damaged file.
    """
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else side_files.in_short(error)
        raise ValueError(f"{path} cannot be used: {why}") from error


def _scaled(sums: Tree, share: float) -> Tree:
    """Scale sums over elements to ranks with ``share`` times as many elements."""
    return {
        name: _scaled(value, share)
        if isinstance(value, dict)
        else value * (1 if name == _SINCE_EPOCH else share)
        for name, value in sums.items()
    }


# ------------------------------------------------------------------------- parts of tensors


def _path_of(key: str) -> Path_:
    """Return the path from its text; ValueError if it is not one."""
    path = json.loads(key)
    Listed(TEXT).check(path, key)
    if not path:
        raise ValueError("an empty path")
    return tuple(path)


def _about(path: Path_, tensor: Tensor, parts: Mapping[str, ShardPart]) -> Tree:
    """Return a file's entry for a tensor (``_ABOUT``)."""
    part = _found(path, parts)
    assert part is not None
    about = {name: list(value) for name, value in part._asdict().items()}
    return about | {CHECKSUM: checksum(tensor)}


class Assembly:
    """Assemble a rank's part of every tensor, from one replica or as the mean over several.

    A saved tensor may match no parameter of this model, or one of another shape. It is then kept
    by name, as a tensor without data of shape ``(R, *shape)``.

    Args:
        parts: parameter name -> this rank's part.
        replicas: replicas to read, in the order in which their parts are added.
    """

    def __init__(self, parts: Mapping[str, ShardPart], replicas: range) -> None:
        self._parts, self._replicas = parts, replicas
        self._sums: dict[Path_, Tensor] = {}
        self._covered: dict[Path_, int] = {}
        self._added: set[tuple[Path_, int, ShardPart]] = set()
        self._unknown: dict[Path_, Tensor] = {}

    def add(
        self, path: Path_, part: ShardPart, replica: int, saved: int, load: Callable[[], Tensor]
    ) -> None:
        """Add a replica's part of a tensor; call ``load`` only if it overlaps this rank's part.

        A part that several tensor-parallel ranks had, and saved, counts once.

        Args:
            path: path of the tensor.
            part: position of the part.
            replica: index of its replica. All parts of the first replica come first.
            saved: number of saved replicas.
            load: returns the part's tensor.
        """
        own = _found(path, self._parts)
        if own is None or own.shape != part.shape:
            self._unknown[path] = torch.empty((saved, *part.shape), device="meta")
            return
        if (path, replica, part) in self._added:
            return
        self._added.add((path, replica, part))
        if path not in self._sums:
            self._sums[path] = torch.zeros(own.sizes, dtype=torch.float32, device="cpu")
            self._covered[path] = 0
        here, there = [], []
        for begin, size, theirs, length in zip(
            own.offsets, own.sizes, part.offsets, part.sizes, strict=True
        ):
            first, last = max(begin, theirs), min(begin + size, theirs + length)
            if first >= last:
                return
            here.append(slice(first - begin, last - begin))
            there.append(slice(first - theirs, last - theirs))
        piece = load()[tuple(there)]
        target = self._sums[path][tuple(here)]
        if replica == self._replicas.start:
            target.copy_(piece)  # adding to zeros would turn -0.0 into 0.0
        else:
            target.add_(piece.float())
        self._covered[path] += target.numel()

    def mean(self) -> dict[Path_, Tensor]:
        """Return the mean over replicas of each added tensor, in float32.

        Raises:
            ValueError: a part is missing, or an element is not finite.
        """
        replicas = len(self._replicas)
        for path, total in self._sums.items():
            needed = replicas * total.numel()
            if self._covered[path] != needed:
                raise ValueError(f"{'/'.join(path)} has {self._covered[path]} of {needed} elements")
            if not bool(total.isfinite().all()):
                raise ValueError(f"{'/'.join(path)} has NaN or infinity")
            if replicas > 1:
                total /= replicas
        return self._sums | self._unknown


def _add(assembly: Assembly, parts: Tree, tensors: Any, replica: int, saved: int) -> None:
    """Add the parts in a file; check each part when it is loaded."""
    for key, about in parts.items():
        part = ShardPart(*(tuple(about[name]) for name in ShardPart._fields))

        def load(key: str = key, about: Tree = about) -> Tensor:
            tensor: Tensor = tensors[key]
            FLOATS.check(tensor, key)
            if checksum(tensor) != about[CHECKSUM]:
                raise ValueError(f"{key} does not have the checksum that it was saved with")
            return tensor

        assembly.add(_path_of(key), part, replica, saved, load)


def taken_out(tree: Tree, names: Mapping[str, tuple[int, ...]]) -> tuple[dict[Path_, Tensor], Tree]:
    """Return the parameter-shaped tensors of a tree by path, and the tree without them.

    Args:
        tree: nested dicts.
        names: parameter name -> shape of this rank's part.
    """
    tensors: dict[Path_, Tensor] = {}

    def rest(part: Tree, path: Path_) -> Tree:
        left: Tree = {}
        for name, value in part.items():
            here = (*path, name)
            if isinstance(value, dict):
                left[name] = rest(value, here)
            elif isinstance(value, Tensor) and _found(here, names) == tuple(value.shape):
                tensors[here] = value
            else:
                left[name] = value
        return left

    return tensors, rest(tree, ())


def put_back(tree: Tree, tensors: Mapping[Path_, Tensor]) -> Tree:
    """Put tensors into ``tree`` at their paths, in place, and return it."""
    for path, tensor in tensors.items():
        part = tree
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = tensor
    return tree


def _found(path: Path_, names: Mapping[str, _T]) -> _T | None:
    """Return the mapping's value for the parameter name in the path; None if it has none."""
    return next((names[name] for name in path if name in names), None)
