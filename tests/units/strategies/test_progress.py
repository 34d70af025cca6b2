"""How far a run has come is known for every combination of Trainer settings."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gc import PerParameter, TopK
from lightning_gc.controllers import DynamicBitWidth
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from lightning_gc.lightning.progress import epochs_of, progress_of, steps_of
from tests.support.fitting import fit
from tests.support.models import Plain, common_batches

INF = float("inf")


def trainer(**more: Any) -> SimpleNamespace:
    given = {"max_epochs": 4, "max_steps": -1, "num_training_batches": 10, "current_epoch": 0}
    return SimpleNamespace(**(given | {"accumulate_grad_batches": 1, "global_step": 0} | more))


@pytest.mark.parametrize(
    ("run", "steps", "epochs"),
    [
        ({}, 40, 4),
        ({"max_steps": 25}, 25, 3),
        ({"max_steps": 99}, 40, 4),
        ({"max_epochs": -1, "max_steps": 25}, 25, 3),
        ({"max_epochs": None, "max_steps": 25}, 25, 3),
        ({"max_epochs": -1}, None, None),
        ({"accumulate_grad_batches": 3}, 16, 4),
        ({"num_training_batches": INF}, None, 4),
        ({"num_training_batches": INF, "max_epochs": -1, "max_steps": 7}, 7, None),
        ({"num_training_batches": INF, "max_epochs": -1}, None, None),
    ],
)
def test_length(run: dict[str, Any], steps: int | None, epochs: int | None) -> None:
    assert steps_of(trainer(**run)) == steps
    assert epochs_of(trainer(**run)) == epochs


@pytest.mark.parametrize(
    ("run", "batch", "share"),
    [
        ({}, 0, 0.0),
        ({"current_epoch": 1}, 5, 15 / 40),
        ({"current_epoch": 2, "max_steps": 25}, 5, 1.0),
        ({"current_epoch": 1, "accumulate_grad_batches": 3}, 7, 6 / 16),
        ({"max_epochs": -1}, 5, None),
        ({"num_training_batches": INF, "current_epoch": 3}, 5, 3 / 4),
        ({"num_training_batches": INF, "max_steps": 50, "global_step": 20}, 5, 0.4),
        ({"num_training_batches": INF, "max_epochs": -1}, 5, None),
    ],
)
def test_progress(run: dict[str, Any], batch: int, share: float | None) -> None:
    assert progress_of(trainer(**run), batch) == share


class LogsItsLoss(Plain):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, **self.how)
        return loss


@pytest.mark.parametrize(
    ("how", "warns"),
    [
        ({}, True),  # Lightning's default in a training step
        ({"on_step": True, "on_epoch": False}, True),
        ({"on_step": False, "on_epoch": True}, False),
        ({"on_step": True, "on_epoch": True}, False),
    ],
)
def test_a_loss_of_the_last_batch_is_warned_of(how: dict[str, bool], warns: bool) -> None:
    steps = ((INF, 0.1), (0.0, 0.5))
    controller = DynamicBitWidth(steps, monitor="train_loss", mode="min")
    strategy = SimulatedDDPStrategy(PerParameter(TopK(0.1)), workers=2, controller=controller)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, partial(LogsItsLoss, **how), lambda: common_batches(16, 4), max_epochs=3)
    texts = [str(each.message) for each in caught]
    found = [text for text in texts if text.startswith("DynamicBitWidth decides by train_loss,")]
    assert len(found) == warns
    assert all("self.log('train_loss', ..., on_epoch=True)" in text for text in found)
