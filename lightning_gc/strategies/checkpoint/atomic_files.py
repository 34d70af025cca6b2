"""Atomic files: a checkpoint file is written beside its target and put in place by one rename.

At any moment, also after a kill or a power cut, the target is the old file or the new one, whole.
Lightning's own ``TorchCheckpointIO`` renames too, but from ``TMPDIR``: if that is another file
system, the rename is a copy over the old file.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from typing import Any

from lightning_gc.strategies.checkpoint import side_files


def write_atomically(
    where: Any, write: Callable[[Any], None], remove: Callable[[Any], None]
) -> None:
    """Write the file ``where`` by ``write``; directly behind a URL, where there is no rename.

    Args:
        where: the target; its folder need not exist.
        write: writes the file at the path that it is given, as a CheckpointIO does.
        remove: removes what ``write`` has written, if that is nowhere in this file system.
    """
    target = os.fspath(where)
    if "://" in target or os.path.isdir(target):
        write(where)
        return
    part = side_files.part_of(target)
    try:
        write(part)
        if os.path.isdir(part):
            shutil.move(part, target)
        elif os.path.isfile(part):
            _flush(part)
            os.replace(part, target)
            _flush(os.path.dirname(target) or os.curdir)
        else:  # a CheckpointIO that stores elsewhere
            write(where)
            remove(part)
    finally:
        if os.path.isfile(part):
            os.remove(part)
        side_files.tidy(target)


class AtomicIO:
    """A CheckpointIO that writes atomically by another; for the inside of asynchronous ones.

    Args:
        checkpoint_io: writes, reads and removes.
    """

    def __init__(self, checkpoint_io: Any) -> None:
        self.checkpoint_io = checkpoint_io

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        def write(there: Any) -> None:
            self.checkpoint_io.save_checkpoint(checkpoint, there, storage_options=storage_options)

        try:
            write_atomically(path, write, self.remove_checkpoint)
        except Exception as error:  # raised later, when another file is written
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
    """Return whether the CheckpointIO wraps another, and so may write in a thread."""
    return hasattr(checkpoint_io, "checkpoint_io")


def make_atomic(checkpoint_io: Any) -> None:
    """Let the innermost of CheckpointIOs that wrap each other write atomically.

    Only that one knows when a file has been written.
    """
    outer: Any = None
    inner = checkpoint_io
    while wraps(inner) and not isinstance(inner, AtomicIO):
        outer, inner = inner, inner.checkpoint_io
    if hasattr(outer, "_checkpoint_io") and not isinstance(inner, AtomicIO):
        outer._checkpoint_io = AtomicIO(inner)  # Lightning's setter takes none after the first


def _flush(path: str) -> None:
    """Flush a file, or a folder's names, to the disk, if its file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # a folder, where folders cannot be opened
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
