"""Which trial wins, and with which seeds and weights it is run again."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor

from lightning_gc.tuning import Method, final_runs
from lightning_gc.tuning.failure_detector import FailureDetector
from lightning_gc.tuning.final_runs import TUNED, run_finals
from lightning_gc.tuning.studies import best_trial
from lightning_gc.tuning.trial import fit
from tests.support.fitting import unwarned
from tests.support.tuning import Bowl, Data, experiment


@pytest.mark.parametrize(("direction", "wins"), [("minimize", 1), ("maximize", 2)])
def test_the_best_trial_depends_on_the_direction(direction: Any, wins: int) -> None:
    study = optuna.create_study(direction=direction)
    for value in (2.0, 1.0, 3.0):
        study.tell(study.ask(), value)
    best = best_trial(study)
    assert best is not None
    assert best.number == wins


def test_a_final_run_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(stopping: Any, trial: Any, seed: int) -> float:
        stopping.update({"loss": 1.0, "seconds": 0.0, "cpu_seconds": 0.0})
        return 10.0 + seed

    monkeypatch.setattr(final_runs, "train", train)
    study = optuna.create_study()
    study.tell(study.ask(), 1.0)
    dense = Method("dense")
    records = run_finals(experiment(seeds=(3, 5)), dense, study, study, FailureDetector())
    assert [(r["source"], r["seed"], r["test"]) for r in records] == [
        (TUNED, 3, 13.0),
        (TUNED, 5, 15.0),
    ]


@pytest.mark.parametrize("workers", [1, 4])
def test_the_cpu_time_of_training_is_shared_by_the_workers_of_a_process(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is not in it: two looks at the clock in an epoch, at both ends of its training."""
    monkeypatch.setattr(time, "process_time", itertools.count(0.0, 8.0).__next__)
    rules, told = experiment(workers=workers), []

    def ask(logged: Mapping[str, float]) -> bool:
        told.append(logged["cpu_seconds"])
        return True

    with unwarned():
        fit(rules, Method("dense"), optuna.trial.FixedTrial({"x": 0.5}), ask, 0)
    assert told == [8.0 / workers] * 2


class Counts(Bowl):
    """Its weights tell the epoch; its validation is best in the first one."""

    epochs: Tensor

    def __init__(self) -> None:
        super().__init__(slope=1.0)
        self.register_buffer("epochs", torch.zeros(1))

    def on_train_epoch_start(self) -> None:
        self.epochs += 1

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.epochs)


@pytest.mark.parametrize(("final", "tested"), [(True, 1.0), (False, None)])
def test_a_final_run_tests_the_weights_of_its_best_epoch(final: bool, tested: float | None) -> None:
    build = experiment(lambda trial: (Counts(), Data()))
    trial = optuna.trial.FixedTrial({})
    with unwarned():
        assert fit(build, Method("dense"), trial, lambda logged: True, 0, final) == tested
