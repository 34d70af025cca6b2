"""A checkpoint that cannot be written, in any of its files, costs no earlier one."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_gc import PerParameter, TopK
from lightning_gc.strategies.checkpoint.side_files import FOLDER
from lightning_gc.strategies.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import Plain, common_batches


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
    assert set(kept) == {"last.ckpt", *(f"last.ckpt-step1-worker{i}of2.pt" for i in range(2))}
    now = contents(tmp_path)
    assert {name: now.get(name) for name in kept} == kept
    assert (tmp_path / FOLDER).is_dir()
