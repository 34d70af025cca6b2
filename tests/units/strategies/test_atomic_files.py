"""Files are put in place by one rename, wherever TMPDIR is and whatever writes them."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_gc.checkpoint.side_files import (
    FOLDER,
    AtomicIO,
    make_atomic,
    wraps,
    write_atomically,
)
from tests.support.damage import files_of, resume, save

OTHER = Path("/dev/shm")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR in another file system, from which no file can be renamed to the checkpoints'."""
    if not OTHER.is_dir() or OTHER.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm, on another file system than the test's folder")
    monkeypatch.setattr(tempfile, "tempdir", str(OTHER))


def writes(text: str) -> Callable[[Any], Any]:
    return lambda path: Path(path).write_text(text)


def never(path: Any) -> None:
    raise AssertionError(f"removes {path}")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("wrapped", [False, True], ids=["at once", "in a thread"])
def test_no_file_is_written_over(tmp_path: Path, wrapped: bool) -> None:
    """Who still has the old file open, such as a reader, sees it whole; a copy would change it."""
    io = AsyncCheckpointIO(TorchCheckpointIO()) if wrapped else None
    path = save(tmp_path, checkpoint_io=io, step=2)
    before = {file: file.read_bytes() for file in (path, *files_of(path))}
    for number, file in enumerate(before):
        os.link(file, tmp_path / f"open{number}")
    save(tmp_path, checkpoint_io=AsyncCheckpointIO() if wrapped else None)
    now = [(tmp_path / f"open{number}").read_bytes() for number in range(3)]
    assert now == list(before.values())
    assert path.read_bytes() != before[path]
    assert not list(tmp_path.rglob("*.part"))
    resume(path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    target.write_text("old")

    def half(path: Any) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("ha")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_atomically(target, half, never)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / FOLDER).mkdir()

    def fsync(descriptor: int) -> None:
        raise OSError(number, "cannot")

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "a.ckpt", writes("new"), never)
    assert (tmp_path / "a.ckpt").read_text() == "new"


def test_a_disk_that_fails_to_flush_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "a.ckpt").write_text("old")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="broken"):
        write_atomically(tmp_path / "a.ckpt", writes("new"), never)
    assert (tmp_path / "a.ckpt").read_text() == "old"


def test_behind_a_url_there_is_no_rename() -> None:
    fsspec.filesystem("memory").store.clear()
    seen: list[str] = []
    write_atomically("memory://runs/a.ckpt", seen.append, never)
    assert seen == ["memory://runs/a.ckpt"]


class Elsewhere(TorchCheckpointIO):
    """Stores where nobody can see it."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.stored[str(path)] = checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        del self.stored[str(path)]


def test_what_stores_elsewhere_gets_the_path_itself(tmp_path: Path) -> None:
    io = Elsewhere()
    AtomicIO(io).save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    assert io.stored == {str(tmp_path / "a.ckpt"): {"x": 1}}


def test_side_files_elsewhere_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    """A resume would not find them, and take errors of zero."""
    with pytest.raises(RuntimeError, match=r"Elsewhere has not written the file.*state='mean'"):
        save(tmp_path, checkpoint_io=Elsewhere())
    io = Elsewhere()
    save(tmp_path, checkpoint_io=io, state="mean")
    assert list(io.stored) == [str(tmp_path / "last.ckpt")]


def test_the_innermost_writes_atomically() -> None:
    """However many wrap it; once; and one that wraps none stays as it is."""
    plain = TorchCheckpointIO()
    make_atomic(plain)
    assert not wraps(plain)
    inner: Any = AsyncCheckpointIO(plain)
    outer: Any = _WrappingCheckpointIO(inner)
    for _ in range(2):
        make_atomic(outer)
        assert outer.checkpoint_io is inner
        assert isinstance(inner.checkpoint_io, AtomicIO)
        assert inner.checkpoint_io.checkpoint_io is plain


class Full(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        raise OSError("no space left")


def test_what_fails_in_a_thread_names_its_file(tmp_path: Path) -> None:
    said = r"worker0of2\.pt could not be written: OSError: no space left"
    with pytest.raises(RuntimeError, match=said) as caught:
        save(tmp_path, checkpoint_io=AsyncCheckpointIO(Full()))
    first: Any = caught.value  # raised again when the threads are ended
    while first is not None and not str(first).startswith("Worker 0 of 2 could not write its "):
        first = first.__context__
    assert first is not None
    assert not list(tmp_path.rglob("*.*"))


def test_a_url_is_saved_to_and_resumed_from() -> None:
    fsspec.filesystem("memory").store.clear()
    torch.manual_seed(0)
    path: Any = "memory://runs/last.ckpt"
    save("memory://runs", checkpoint_io=None)  # type: ignore[arg-type]
    stored = [name for name in fsspec.filesystem("memory").store if "worker" in name]
    assert len(stored) == 2
    assert resume(path)
