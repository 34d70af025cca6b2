"""Epochs after the last validation count: their bytes are recorded, and held against the budget."""

from pathlib import Path
from typing import Any

import optuna
import pytest

from lightning_gc.tuning import Method
from lightning_gc.tuning.early_stopping import EarlyStopping
from tests.support.tuning import QUIET, compare, experiment
from tests.tuning.test_experiment_rules import SENT, TIMES

SELDOM: dict[str, Any] = {**QUIET, "max_epochs": 3, "check_val_every_n_epoch": 2}
THIN = Method("topk", fixed={"density": 0.1})


def sent(tmp_path: Path, **changes: Any) -> float:
    """Return the bytes of a run with these settings."""
    study = compare(tmp_path / "whole.journal", THIN, trials=1, **changes)["topk"]
    return float(study.trials[0].user_attrs["wire_bytes"])


@pytest.mark.parametrize("finals", [False, True])
def test_bytes_of_epochs_after_the_last_validation_are_recorded(
    tmp_path: Path, finals: bool
) -> None:
    studies = compare(tmp_path / "a.journal", THIN, trials=1, trainer=SELDOM, finals=finals)
    known = studies["topk"].user_attrs
    runs = [studies["topk"].trials[0].user_attrs]
    runs += [record for name, record in known.items() if name.startswith("final/")]
    whole = sent(tmp_path, trainer={**QUIET, "max_epochs": 3})
    assert len(runs) == 1 + finals  # the only trial has dense's hyper-parameters
    assert [(run["wire_bytes"], len(run["curve"])) for run in runs] == [(whole, 1)] * len(runs)


@pytest.mark.parametrize(("share", "state"), [(0.99, "PRUNED"), (1.0, "COMPLETE")])
def test_a_budget_that_is_exceeded_after_the_last_validation_prunes_the_trial(
    tmp_path: Path, share: float, state: str
) -> None:
    whole = sent(tmp_path, trainer={**QUIET, "max_epochs": 3})
    rules: dict[str, Any] = {"trials": 1, "trainer": SELDOM, "budget": share * whole}
    (trial,) = compare(tmp_path / "b.journal", THIN, **rules)["topk"].trials
    assert trial.state.name == state
    assert trial.user_attrs["over_budget"] == pytest.approx(1 / share - 1)
    assert ("the budget is" in trial.user_attrs["reason"]) == (state == "PRUNED")


def test_a_run_that_has_diverged_stays_so_whatever_it_sends_later() -> None:
    trial = optuna.create_study().ask()
    stopping = EarlyStopping(experiment(budget=1.0), THIN, trial)
    assert not stopping.update({"loss": float("nan"), **TIMES, SENT: 0.5})
    assert not stopping.update({SENT: 2.0})
    assert stopping.outcome == "diverged"
    assert stopping.record()["wire_bytes"] == 2
