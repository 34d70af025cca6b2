"""A fit after one that an exception has ended within an exchange is whole, and so are its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_gc import ErrorFeedback, PerParameter, TopK
from lightning_gc.checkpoint.side_files import FOLDER
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.fitting import quiet_trainer, unwarned


class FailsOnce(ErrorFeedback):
    failed = False

    def flow(self, *args: Any) -> Any:
        if not FailsOnce.failed:
            FailsOnce.failed = True
            raise MemoryError("full")
        yield from super().flow(*args)


def test_its_checkpoint_has_errors(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(FailsOnce, "failed", False)
    strategy = SimulatedDDPStrategy(PerParameter(TopK(0.1)), FailsOnce(), workers=2)
    trainer = quiet_trainer(strategy, limit_train_batches=4, limit_val_batches=0)
    with unwarned():
        with pytest.raises(MemoryError, match="full"):
            trainer.fit(BoringModel())
        engine = strategy.engine
        assert engine is not None
        assert engine.torn
        trainer.fit_loop.max_epochs = 2
        trainer.fit(BoringModel())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["lightning_gc"]["torn"] is False
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
