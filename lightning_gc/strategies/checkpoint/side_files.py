"""Side files: each worker's error state in a file beside the checkpoint; paths, read, remove."""

from __future__ import annotations

import contextlib
import inspect
import os
import posixpath
from collections.abc import Iterable
from typing import Any

import torch
from fsspec.core import url_to_fs

# A folder, because Lightning takes files beside a checkpoint for checkpoints, by their names.
FOLDER = "lightning_gc_state"


def stem_of(checkpoint: Any, step: int) -> str:
    """Return the prefix of the names of a checkpoint's side files.

    With the step: a checkpoint saved again under its old name must leave the old side files intact
    until the new ones are complete.
    """
    return f"{_split(checkpoint)[1]}-step{step}"


def path_of(checkpoint: Any, stem: str, worker: int, workers: int) -> str:
    """Return the path of one worker's side file; beside its target, if the checkpoint is a link."""
    path = os.fspath(checkpoint)  # such as last.ckpt
    folder, _ = _split(os.path.realpath(path) if os.path.islink(path) else path)
    return posixpath.join(folder, FOLDER, f"{stem}-worker{worker}of{workers}.pt")


def exists(path: str) -> bool:
    """Return whether the file exists, locally or remotely."""
    fs, inner = url_to_fs(path)
    return bool(fs.exists(inner))


def read(path: str, checkpoint_io: Any) -> Any:
    """Return a side file's tensors, numbers, strings, lists and dicts; no pickled code is run."""
    while getattr(checkpoint_io, "checkpoint_io", None) is not None:
        checkpoint_io = checkpoint_io.checkpoint_io  # unwrap, such as an asynchronous one
    safely = "weights_only" in inspect.signature(checkpoint_io.load_checkpoint).parameters
    try:
        if safely:
            return checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=True)
        fs, inner = url_to_fs(path)  # Lightning before 2.6 would unpickle anything
        with fs.open(inner, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0].partition(". ")[0]  # torch adds unsafe advice
        raise RuntimeError(
            f"The error state in {path} cannot be read ({type(error).__name__}: {first}). Restore "
            f"the file, or resume with CompressedDDPStrategy(state='off') and errors of zero."
        ) from error


def remove(checkpoint: Any, keep: Iterable[str] = ()) -> None:
    """Remove a checkpoint's side files of all workers, except those of stems in ``keep``.

    Several workers may do so at once.
    """
    folder, base = _split(checkpoint)
    fs, inner = url_to_fs(posixpath.join(folder, FOLDER))
    try:
        names = [posixpath.basename(str(path)) for path in fs.ls(inner, detail=False)]
    except FileNotFoundError:
        return
    kept = tuple(f"{stem}-worker" for stem in keep)
    for name in names:
        if name.startswith(f"{base}-step") and not (kept and name.startswith(kept)):
            with contextlib.suppress(OSError):  # removed already
                fs.rm(posixpath.join(inner, name))
    tidy(checkpoint)


def tidy(checkpoint: Any) -> None:
    """Remove the folder beside a checkpoint if it is empty."""
    fs, inner = url_to_fs(posixpath.join(_split(checkpoint)[0], FOLDER))
    with contextlib.suppress(OSError):  # removed already, or not empty
        fs.rmdir(inner)


def _split(checkpoint: Any) -> tuple[str, str]:
    """Return folder and name of a local path or URL."""
    path = os.fspath(checkpoint)
    if "://" not in path:
        return os.path.split(path)
    folder, _, name = path.rpartition("/")
    return folder, name
