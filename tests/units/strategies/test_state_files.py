"""State files are found on disk and behind URLs, hold no code, and go with their checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.shard_store import ShardStore
from lightning_gc.checkpoint.side_files import (
    FOLDER,
    exists,
    path_of,
    read,
    remove,
    stem_of,
)


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path)
    fsspec.filesystem("memory").store.clear()
    return "memory://runs"


def write(path: str, step: int, workers: int = 2) -> list[str]:
    paths = [path_of(path, stem_of(path, step, "save"), i, workers) for i in range(workers)]
    for i, side in enumerate(paths):
        TorchCheckpointIO().save_checkpoint({"worker": i, "x": torch.ones(3)}, side)
    return paths


def test_written_found_and_read(root: str) -> None:
    paths = write(f"{root}/a.ckpt", 5)
    assert paths[1] == f"{root}/{FOLDER}/a.ckpt-step5-save-worker1of2.pt"
    assert all(exists(path) for path in paths)
    assert not exists(path_of(f"{root}/a.ckpt", stem_of("a.ckpt", 6, "save"), 0, 2))
    for io in (TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO()), Old()):
        assert read(paths[1], io)["worker"] == 1


class Old(TorchCheckpointIO):
    """As before Lightning 2.6: nothing is said about what may be unpickled."""

    def load_checkpoint(self, path: Any, map_location: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("would unpickle anything")


def test_removed_are_those_of_the_checkpoint_only(root: str) -> None:
    for name, step in (("a.ckpt", 1), ("a.ckpt", 2), ("b.ckpt", 1), ("aa.ckpt", 1)):
        write(f"{root}/{name}", step)
    remove(f"{root}/a.ckpt", keep=["a.ckpt-step2-save"])
    fs, inner = fsspec.core.url_to_fs(f"{root}/{FOLDER}")

    def left() -> set[str]:
        return {
            str(path).rpartition("/")[2].partition("-worker")[0] for path in fs.ls(inner, False)
        }

    assert left() == {"a.ckpt-step2-save", "b.ckpt-step1-save", "aa.ckpt-step1-save"}
    remove(f"{root}/a.ckpt")
    remove(f"{root}/a.ckpt")  # another worker may have been quicker
    assert left() == {"b.ckpt-step1-save", "aa.ckpt-step1-save"}
    remove(f"{root}/b.ckpt")
    remove(f"{root}/aa.ckpt")
    side_files.tidy(f"{root}/aa.ckpt")
    assert not fs.exists(inner) or not fs.ls(inner, False)


def test_those_of_a_longer_name_stay(root: str) -> None:
    """A checkpoint may be called as the side files of another one begin."""
    kept = write(f"{root}/model-step2", 2) + write(f"{root}/model-step2-step3", 3)
    written = write(f"{root}/model", 2)
    old = path_of(f"{root}/model", "model-step1", 0, 2)  # as named before saves had names
    half = f"{written[0]}.part"
    for path in (old, half):
        TorchCheckpointIO().save_checkpoint({}, path)
    remove(f"{root}/model")
    assert not any(exists(path) for path in [*written, old, half])
    assert all(exists(path) for path in kept)
    remove(f"{root}/model-step2")
    assert [exists(path) for path in kept] == [False, False, True, True]


def test_folders_of_a_longer_name_stay(tmp_path: Path) -> None:
    """As above, with models in shards, whose checkpoints may be folders too."""
    names = ["model-step1-run-1", "model-step2-run-1", "model-step2-step3-run-2"]
    for stem in names:
        (tmp_path / FOLDER / stem).mkdir(parents=True)
    other = tmp_path / "model-step2"
    other.mkdir()
    host: Any = SimpleNamespace(global_rank=0)
    store = ShardStore(host, "full", torch.float32)
    store.remove(tmp_path / "model", keep=names[1])
    assert sorted(each.name for each in (tmp_path / FOLDER).iterdir()) == names[1:]
    store.remove(tmp_path / "model")
    assert [each.name for each in (tmp_path / FOLDER).iterdir()] == names[2:]
    assert other.is_dir()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    file.write_text("no tensors")
    with pytest.raises(ValueError, match=r"it cannot be read \(UnpicklingError: "):
        read(str(file), TorchCheckpointIO())


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harm",))

    torch.save({"x": Evil()}, tmp_path / "x.pt")
    for io in (TorchCheckpointIO(), Old()):
        with pytest.raises(ValueError, match="cannot be read"):
            read(str(tmp_path / "x.pt"), io)
    assert not (tmp_path / "harm").exists()


def test_lightning_takes_no_side_file_for_a_requeued_checkpoint(tmp_path: Path) -> None:
    """It reads the number of every name with hpc_ckpt_ beside the checkpoints."""
    import pytorch_lightning as pl

    for number in (1, 2):
        (tmp_path / f"hpc_ckpt_{number}.ckpt").touch()
        write(f"{tmp_path}/hpc_ckpt_{number}.ckpt", 700)
    trainer = pl.Trainer(default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    found = trainer._checkpoint_connector._hpc_resume_path
    assert found == str(tmp_path / "hpc_ckpt_2.ckpt")


def test_side_files_lie_beside_the_target_of_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "runs" / "best.ckpt", tmp_path / "elsewhere" / "last.ckpt"
    for file in (target, link):
        file.parent.mkdir()
    target.touch()
    link.symlink_to(target)
    assert path_of(link, "best.ckpt-step5", 0, 1) == path_of(target, "best.ckpt-step5", 0, 1)
