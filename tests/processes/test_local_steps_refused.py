"""What local steps refuse when a fit begins or later, and a worker that dies within a round."""

import functools
import os
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_gc import TopK
from tests.support.fitting import fit
from tests.support.local_steps import Learner, fit_local, local
from tests.support.models import own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


def refused(worker: int) -> dict[str, str]:
    """A worker alone, in a process of its own."""
    said = {}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "manual": ({}, {}),
        "sync": ({"batch_norm": True}, {"sync_batchnorm": True}),
        "swa": ({}, {"callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2)]}),
        "pruning": ({}, {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)]}),
        "unfrozen": ({}, {"callbacks": [Unfreeze()]}),
    }
    for name, (module, trainer) in cases.items():
        try:
            fit(
                local(TopK(0.1), every=2),
                functools.partial(made, name, module),
                own_batches(worker, 4),
                devices=1,
                **trainer,
            )
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    left = fit(local(TopK(0.1), every=3), Learner, own_batches(worker, 4), devices=1)
    return said | {"alone": str(left["rounds"])}


def made(name: str, settings: dict[str, Any]) -> Learner:
    learner = Learner(**settings)
    learner.automatic_optimization = name != "manual"
    if name == "unfrozen":
        learner.head.requires_grad_(False)
    return learner


class Unfreeze(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.head.requires_grad_(True)


def test_what_is_refused_when_a_fit_begins() -> None:
    (said,) = run_in_processes(refused, 1)
    assert "automatic optimization" in said["manual"]
    assert "body.1 is SyncBatchNorm" in said["sync"]
    assert "remove the callback" in said["swa"]
    assert "prune after the fit, or use CompressedDDPStrategy" in said["pruning"]
    assert "head.weight was unfrozen" in said["unfrozen"]
    assert said["alone"] == "[2]", "one worker goes through the same path"


class Die(pl.Callback):
    """Ends worker 1 at once, within a round."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os._exit(1)


def with_one_that_dies(worker: int) -> str:
    try:
        fit_local(
            worker,
            compressor=TopK(0.1),
            every=4,
            timeout=timedelta(seconds=4),
            trainer={"callbacks": [Die()]},
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.nightly
def test_a_dead_worker_is_noticed_at_the_next_exchange() -> None:
    (said,) = run_in_processes(with_one_that_dies, 2, wait_for=1, timeout=60)
    assert said.startswith("PeerError: "), said
