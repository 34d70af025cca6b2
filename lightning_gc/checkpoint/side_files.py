"""Name, read, write and remove side files: each worker's error state next to the checkpoint.

Also the attributes of a strategy that stores use, and acts that succeed on all ranks or on none.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from fsspec.core import url_to_fs
from torch import Tensor

from lightning_gc.checkpoint.worker_state import CheckpointParts
from lightning_gc.core.notices import waiting
from lightning_gc.exchange.peers import all_or_raise, explaining
from lightning_gc.transports.distributed import Distributed, broadcast_text, gather_text
from lightning_gc.transports.peer_error import awaiting_peers

KEY = "lightning_gc"
"""Key of this library's part in a checkpoint."""

# A folder, because Lightning takes files next to a checkpoint for checkpoints, by their names.
FOLDER = "lightning_gc_state"
_NAME = re.compile(r"(?P<stem>(?P<base>.+)-step(?P<step>\d+).*)-worker(\d+)of(?P<workers>\d+)\.pt")
_OWNED = re.compile(r"(?P<base>.+)-step\d+.*")  # greedy: our "-step" is the last one


class AnyHost(Protocol):
    """Attributes of a strategy of Lightning or Fabric that stores use on all ranks."""

    root_device: torch.device
    global_rank: int
    world_size: int
    checkpoint_io: Any


class Host(AnyHost, Protocol):
    """Attributes of a Lightning strategy that saving and restoring use."""

    checkpoint_parts: CheckpointParts
    local_rank: int
    reduce: Callable[..., Tensor]

    @property
    def is_alone(self) -> bool:
        """Whether this worker may be the only one that saves, as after an exception.

        A collective would hang then.
        """

    def metrics(self) -> tuple[Mapping[str, Any], Collection[str]]:
        """Return current values of metrics, and the names of those that are yet to come."""


_PURPOSE, _UNTIL = "a checkpoint", "save or read a checkpoint"


def together(
    host: AnyHost, acts: Mapping[int, Callable[[], Any]], workers: int = 0, alone: bool = False
) -> dict[int, Any]:
    """Call the acts of this process's workers; return all workers' results.

    Args:
        host: the strategy.
        acts: worker -> act, which returns a text or None.
        workers: W, if it is not the number of ranks.
        alone: whether other ranks may not take part, as after an exception.

    Raises:
        RuntimeError: on all workers, if an act fails on one.
    """

    def gather(text: str) -> list[str]:
        if alone or host.world_size == 1:
            return [text]
        return gather_text(text, Distributed(purpose=_PURPOSE), host.root_device, _UNTIL)

    return all_or_raise(acts, workers or host.world_size, gather)


def on_all_ranks(host: AnyHost, problem: str, act: Callable[[], Any]) -> dict[int, Any]:
    """Call ``act`` on each rank; if it fails on one, raise ``problem`` and the reason on all."""
    return together(host, {host.global_rank: explaining(problem, act)})


def told_by_rank_0(host: AnyHost, text: str) -> str:
    """Return rank 0's text on all ranks."""
    with awaiting(host):
        return broadcast_text(text, host.root_device, purpose=_PURPOSE)


def stem_of(checkpoint: Any, step: int, save: str) -> str:
    """Return the prefix of the names of a checkpoint's side files.

    It has the step, for ``checkpoint_before``, and ``save``, a name for this save: a checkpoint
    saved again under its old name leaves the old side files intact until the new ones are complete.
    """
    return f"{_split(checkpoint)[1]}-step{step}-{save}"


def belongs_to(checkpoint: Any, name: str) -> bool:
    """Return whether a file or folder of error state belongs to this checkpoint, by its name."""
    match = _OWNED.fullmatch(name)
    return match is not None and match["base"] == _split(checkpoint)[1]


def path_of(checkpoint: Any, stem: str, worker: int, workers: int) -> str:
    """Return the path of one worker's side file; a link's side files are next to its target."""
    folder, _ = _split(_target(checkpoint))
    return posixpath.join(folder, FOLDER, f"{stem}-worker{worker}of{workers}.pt")


def part_of(path: str) -> str:
    """Return the temporary path of a local checkpoint or side file while it is written.

    It is in the folder of side files, because Lightning would take it for a checkpoint elsewhere.
    """
    return os.path.join(_folder(path), f"{os.path.basename(path)}.part")


def exists(path: str) -> bool:
    """Return whether the file exists, locally or remotely."""
    fs, inner = url_to_fs(path)
    return bool(fs.exists(inner))


def read(path: str, checkpoint_io: Any) -> Any:
    """Return a side file's tensors, numbers, strings, lists and dicts; no pickled code is run.

    Raises:
        ValueError: it cannot be read.
    """
    inner = checkpoint_io
    while getattr(inner, "checkpoint_io", None) is not None:
        inner = inner.checkpoint_io  # unwrap wrappers such as AsyncCheckpointIO
    safely = "weights_only" in inspect.signature(inner.load_checkpoint).parameters
    try:
        with reading(path):
            if safely:
                return checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=True)
            fs, where = url_to_fs(path)  # Lightning before 2.6 would unpickle anything
            with fs.open(where, "rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"it cannot be read ({in_short(error)})") from error


def awaiting(host: AnyHost) -> contextlib.AbstractContextManager[None]:
    """Name the ranks that take long to save or read a checkpoint."""
    return awaiting_peers(_UNTIL, host.global_rank, host.world_size)


def reading(path: Any) -> contextlib.AbstractContextManager[None]:
    """Name a file that takes long to be read."""
    return waiting(f"Waiting for {os.fspath(path)} to be read")


def writing(path: Any) -> contextlib.AbstractContextManager[None]:
    """Name a file that takes long to be written."""
    return waiting(f"Waiting for {os.fspath(path)} to be written")


def in_short(error: Exception) -> str:
    """Return an exception's class and first sentence; torch's later ones give unsafe advice."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].partition('. ')[0]}"


def checkpoint_before(checkpoint: Any, step: int) -> str | None:
    """Return the other checkpoint in the same folder with the highest step up to ``step``.

    Consider only checkpoints with the side files of all their workers. Return None if none exists.
    """
    folder, own = _split(_target(checkpoint))
    fs, inner = url_to_fs(posixpath.join(folder, FOLDER))
    try:
        names = [posixpath.basename(str(path)) for path in fs.ls(inner, detail=False)]
    except OSError:
        return None
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    stems = [match["stem"] for match in found]
    whole = [m for m in found if stems.count(m["stem"]) == int(m["workers"])]
    for match in sorted(whole, key=lambda m: (int(m["step"]), m["base"]), reverse=True):
        path = posixpath.join(folder, match["base"])
        if match["base"] != own and int(match["step"]) <= step and exists(path):
            return path
    return None


def remove(checkpoint: Any, keep: Iterable[str] = ()) -> None:
    """Remove all workers' side files of a checkpoint, except files with a stem in ``keep``.

    Several workers may call this at once.
    """
    folder, _ = _split(checkpoint)
    fs, inner = url_to_fs(posixpath.join(folder, FOLDER))
    try:
        names = [posixpath.basename(str(path)) for path in fs.ls(inner, detail=False)]
    except FileNotFoundError:
        return
    kept = tuple(f"{stem}-worker" for stem in keep)
    for name in names:
        if belongs_to(checkpoint, name) and not (kept and name.startswith(kept)):
            with contextlib.suppress(OSError):  # removed already
                fs.rm(posixpath.join(inner, name))
    tidy(checkpoint)


def tidy(checkpoint: Any) -> None:
    """Remove a checkpoint's folder of side files if it is empty."""
    fs, inner = url_to_fs(_folder(checkpoint))
    with contextlib.suppress(OSError):  # removed already, or not empty
        fs.rmdir(inner)


def _target(checkpoint: Any) -> str:
    """Return the target of a link, such as last.ckpt; return any other path unchanged."""
    path: str = os.fspath(checkpoint)
    return os.path.realpath(path) if os.path.islink(path) else path


def _folder(path: Any) -> str:
    """Return the folder of side files of a checkpoint, or of a side file."""
    folder, _ = _split(path)
    return folder if posixpath.basename(folder) == FOLDER else posixpath.join(folder, FOLDER)


def _split(checkpoint: Any) -> tuple[str, str]:
    """Return folder and name of a local path or URL."""
    path = os.fspath(checkpoint)
    if "://" not in path:
        return os.path.split(path)
    folder, _, name = path.rpartition("/")
    return folder, name


def write_atomically(
    where: Any, write: Callable[[Any], None], remove: Callable[[Any], None]
) -> None:
    """Write the file ``where`` by ``write`` under a temporary name, then rename it.

    A URL is written directly, because remote stores have no rename.

    Args:
        where: path of the file. Its folder need not exist.
        write: writes a file at a given path, as a CheckpointIO does.
        remove: removes the temporary file of a CheckpointIO that uses another store.
    """
    target = os.fspath(where)
    if "://" in target or os.path.isdir(target):
        write(where)
        return
    part = part_of(target)
    try:
        write(part)
        if os.path.isdir(part):
            shutil.move(part, target)
        elif os.path.isfile(part):
            _flush(part)
            os.replace(part, target)
            _flush(os.path.dirname(target) or os.curdir)
        else:  # a CheckpointIO with another store
            write(where)
            remove(part)
    finally:
        if os.path.isfile(part):
            os.remove(part)
        tidy(target)


def put(where: Any, write: Callable[[Any], None], checkpoint_io: Any) -> None:
    """Write the file ``where`` by ``write``, atomically unless the CheckpointIO wraps another."""
    with writing(where):
        if wraps(checkpoint_io):  # may write in a thread; ``make_atomic``
            write(where)
        else:
            write_atomically(where, write, checkpoint_io.remove_checkpoint)


class AtomicIO:
    """Make another CheckpointIO write atomically; goes inside asynchronous CheckpointIOs.

    Args:
        checkpoint_io: writes, reads and removes the files.
    """

    def __init__(self, checkpoint_io: Any) -> None:
        self.checkpoint_io = checkpoint_io

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        def write(there: Any) -> None:
            self.checkpoint_io.save_checkpoint(checkpoint, there, storage_options=storage_options)

        try:
            write_atomically(path, write, self.remove_checkpoint)
        except Exception as error:  # an asynchronous CheckpointIO raises this at a later save
            raise RuntimeError(
                f"{os.fspath(path)} could not be written: {type(error).__name__}: {error}"
            ) from error

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        self.checkpoint_io.teardown()


def wraps(checkpoint_io: Any) -> bool:
    """Return whether the CheckpointIO wraps another and so may write in a thread."""
    return hasattr(checkpoint_io, "checkpoint_io")


def make_atomic(checkpoint_io: Any) -> None:
    """Make the innermost of nested CheckpointIOs write atomically.

    Only the innermost one knows when a file has been written.
    """
    outer: Any = None
    inner = checkpoint_io
    while wraps(inner) and not isinstance(inner, AtomicIO):
        outer, inner = inner, inner.checkpoint_io
    if hasattr(outer, "_checkpoint_io") and not isinstance(inner, AtomicIO):
        outer._checkpoint_io = AtomicIO(inner)  # Lightning's setter refuses a second value


def _flush(path: str) -> None:
    """Flush a file, or a folder's entries, to disk, if the file system supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # a system that cannot open folders
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
