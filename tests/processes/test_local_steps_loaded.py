"""Weights that callbacks load or swap: all workers go on from worker 0's, and from their own."""

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl

from lightning_gc import QSGD, TopK
from tests.support.accelerator import WORKERS, needs_two
from tests.support.local_steps import fit_local
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]


class Loads(pl.Callback):
    """Sets all weights, to others on each worker, in a hook; stops after some steps."""

    def __init__(self, hook: str, stop: int = -1) -> None:
        self.stop = stop
        setattr(self, hook, self._load)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.stop

    def _load(self, trainer: Any, module: Any, stage: str = "") -> None:
        for param in module.parameters():
            param.data.fill_(0.01 * (1 + trainer.global_rank))


class Swaps(pl.Callback):
    """Validates other weights, as callbacks do that keep a moving average of their own."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.own = [param.detach().clone() for param in pl_module.parameters()]
        for param in pl_module.parameters():
            param.data.fill_(0.01)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for param, own in zip(pl_module.parameters(), self.own, strict=True):
            param.data.copy_(own)


def everything(worker: int) -> dict[str, Any]:
    """In one pair of processes, for starting them takes long."""
    found: dict[str, Any] = {}
    for hook, stop in {"setup": -1, "on_fit_start": -1, "on_train_end": 5}.items():
        loads = {"callbacks": [Loads(hook, stop)]}
        found[hook] = fit_local(worker, compressor=TopK(0.1), every=3, trainer=loads)
    validations: dict[str, list[pl.Callback]] = {
        "validated": [],
        "swapped": [Swaps()],
        "loaded": [Loads("on_validation_end")],
    }
    for name, callbacks in validations.items():
        found[name] = fit_local(
            worker,
            compressor=QSGD(4),
            every=3,
            module={"batch_norm": True},
            validation=True,
            trainer={"val_check_interval": 2, "callbacks": callbacks},
        )
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(everything, WORKERS)
    return results


def test_weights_loaded_when_the_fit_begins_are_worker_0s(found: list[dict[str, Any]]) -> None:
    assert len({worker[h]["digest"] for worker in found for h in ("setup", "on_fit_start")}) == 1


def test_weights_loaded_when_the_fit_ends_are_worker_0s(found: list[dict[str, Any]]) -> None:
    """Bit for bit, though the fit was stopped within a round."""
    for worker in found:
        assert worker["on_train_end"]["steps"] == 5
        assert all((p == np.float32(0.01)).all() for p in worker["on_train_end"]["parameters"])


def test_weights_loaded_in_a_validation_are_worker_0s(found: list[dict[str, Any]]) -> None:
    """After steps 2, 4 and 6 all go on alike, beside exchanges after 3 and 6."""
    first, second = (worker["loaded"]["trained"] for worker in found)
    assert [a == b for a, b in zip(first, second, strict=True)] == [
        step in (0, 2, 3, 4, 6) for step in range(8)
    ]
    assert first[2] == first[4] == first[6]


def test_weights_swapped_in_for_a_validation_are_not_trained(found: list[dict[str, Any]]) -> None:
    for worker in found:
        weights = [each[:64] for each in worker["swapped"]["validated"]]  # before buffers
        assert len(weights) == 4
        assert len(set(weights)) == 1
        assert worker["swapped"]["trained"] == worker["validated"]["trained"]
        assert worker["swapped"]["digest"] == worker["validated"]["digest"]
