"""How far a run has come is known for every combination of Trainer settings."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gc.strategies.training_progress import epochs_of, progress_of, steps_of

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
