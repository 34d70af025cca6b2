"""A setting under which Lightning waits for ever for a dead worker is warned of."""

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

from lightning_gc.lightning.workarounds import warn_of_blocking_waits
from tests.support.fitting import quiet_trainer


@pytest.fixture
def trainer() -> pl.Trainer:
    return quiet_trainer("auto", accelerator="cpu")


def starts(trainer: Any, blocking: str, backend: str, patch: pytest.MonkeyPatch) -> None:
    # A group that was made without naming a backend has no other name.
    patch.setattr(dist, "get_backend", lambda: "undefined")
    patch.setattr(dist, "get_backend_config", lambda: backend)
    patch.setenv("TORCH_NCCL_BLOCKING_WAIT", blocking)
    warn_of_blocking_waits(trainer)


@pytest.mark.skipif(
    not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    reason="this Lightning broadcasts nothing",
)
def test_no_watchdog(trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="wait for ever. Unset TORCH_NCCL_BLOCKING_WAIT; the"):
        starts(trainer, "1", "cpu:gloo,cuda:nccl", monkeypatch)


@pytest.mark.parametrize(("blocking", "backend"), [("0", "nccl"), ("", "nccl"), ("1", "gloo")])
def test_all_else_is_not_warned_of(
    trainer: pl.Trainer, blocking: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        starts(trainer, blocking, backend, monkeypatch)
