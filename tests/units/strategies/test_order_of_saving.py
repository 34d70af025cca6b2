"""A checkpoint that cannot be written, in any of its files, costs no earlier one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_gc import PerParameter, TopK
from lightning_gc.checkpoint.side_file_store import SideFileStore
from lightning_gc.checkpoint.side_files import FOLDER
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import Plain, common_batches
from tests.support.resuming import side_files


class FullDisk(TorchCheckpointIO):
    """From some time on, has no room for one kind of file."""

    refused = ""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        kind = "side file" if "worker" in Path(path).name else "main file"
        if kind == self.refused:
            raise OSError("no space left")
        super().save_checkpoint(checkpoint, path, storage_options)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("refused", ["side file", "main file"])
def test_the_earlier_checkpoint_stays_whole(tmp_path: Path, refused: str) -> None:
    """One that is replaced keeps its side files until the new main file is there."""
    disk = FullDisk()
    strategy = SimulatedDDPStrategy(PerParameter(TopK(0.1)), workers=2, checkpoint_io=disk)
    path = tmp_path / "last.ckpt"
    kept: dict[str, bytes] = {}

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            step = trainer.strategy.engine.step
            if step == 1 and not kept:
                trainer.save_checkpoint(path)
                kept.update(contents(tmp_path))
            elif step == 2 and not disk.refused:
                disk.refused = refused
                with pytest.raises(RuntimeError, match=r"could not write .*no space left"):
                    trainer.save_checkpoint(path)

    with unwarned():
        quiet_trainer(strategy, callbacks=[Saves()]).fit(Plain(), common_batches(16, 4))
    assert disk.refused
    assert len(kept) == 3
    assert {f"last.ckpt-step1-worker{i}of2.pt" for i in range(2)} <= set(side_files(tmp_path))
    now = contents(tmp_path)
    assert {name: now.get(name) for name in kept} == kept
    assert (tmp_path / FOLDER).is_dir()


@pytest.mark.parametrize(
    ("rank", "alone", "wrapped", "left"),
    [
        (0, False, False, {"c"}),
        (2, False, False, {"c"}),
        (0, True, False, {"c"}),
        (2, True, False, {"a", "b", "c"}),  # nobody may have written the checkpoint
        (0, False, True, {"b", "c"}),  # that of "c" may still be written, in a thread
    ],
)
def test_old_side_files_are_removed_by_who_knows_of_a_new_checkpoint(
    tmp_path: Path, rank: int, alone: bool, wrapped: bool, left: set[str]
) -> None:
    """Each node's first worker does so; worker 2 here is that of a second one."""
    io = SimpleNamespace(checkpoint_io=None) if wrapped else SimpleNamespace()
    host: Any = SimpleNamespace(checkpoint_io=io, global_rank=rank, local_rank=0, is_alone=alone)
    saving, path = SideFileStore(host, "full", torch.float32), tmp_path / "x.ckpt"
    (tmp_path / FOLDER).mkdir()
    for name in "abc":
        (tmp_path / FOLDER / f"x.ckpt-step1-{name}-worker0of4.pt").touch()
        saving._remove_old_side_files(path, f"x.ckpt-step1-{name}")
    names = {file.name for file in (tmp_path / FOLDER).iterdir()}
    assert names == {f"x.ckpt-step1-{name}-worker0of4.pt" for name in left}
