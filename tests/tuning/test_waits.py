"""A study that waits for a storage, or for other processes, says for which."""

import functools
import os
import sqlite3
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from lightning_gc.core import notices
from lightning_gc.tuning import Method, open_storage
from lightning_gc.tuning.failure_detector import begin_trial, owner
from lightning_gc.tuning.final_runs import _planned
from lightning_gc.tuning.studies import open_study
from lightning_gc.tuning.trial import SubprocessError, fit_in_subprocess
from tests.support.tuning import compare, experiment
from tests.support.waits import hearing, held


def test_a_journal_that_another_process_has_locked(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    storage, lock = open_storage(path), Path(f"{path}.lock")
    os.symlink(path, lock)
    with hearing(f"Waiting for {path}, which another process has locked", lock.unlink):
        study = optuna.create_study(study_name="s", storage=storage)
    assert study.study_name == "s"


def test_a_database_that_another_process_has_locked(tmp_path: Path) -> None:
    """When it is opened, and later."""
    path = tmp_path / "study.db"
    url = f"sqlite:///{path}?timeout=60"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    sentence = f"Waiting for the database {url}"
    other.execute("BEGIN EXCLUSIVE")
    with hearing(sentence, other.rollback):
        storage = open_storage(url)
    study = optuna.create_study(study_name="s", storage=storage)
    other.execute("BEGIN EXCLUSIVE")
    with hearing(sentence, other.rollback):
        study.set_user_attr("x", 1)
    other.close()
    assert study.user_attrs == {"x": 1}
    assert isinstance(storage, RDBStorage)
    storage.remove_session()
    storage.engine.dispose()


def test_trials_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    study = open_study(experiment(trials=1), Method("dense"), open_storage(path))
    trial = begin_trial(study, 1)
    assert trial is not None

    def end() -> None:
        study.tell(trial, state=TrialState.PRUNED)

    with hearing("Waiting for other processes to end trials of toy/dense (", end):
        compare(path, trials=1)
    assert [each.state for each in study.trials] == [TrialState.PRUNED]


def test_final_runs_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    study = compare(path, trials=1)["dense"]
    keys = [key for key, *_ in _planned(experiment(trials=1), Method("dense"), study, study)]
    for key in keys:
        study.set_user_attr(key, owner())

    def release() -> None:
        for key in keys:
            study.set_user_attr(key, None)

    with hearing("Waiting for other processes to end final runs of toy/dense (", release):
        compare(path, trials=1, finals=True)
    attributes = open_study(experiment(trials=1), Method("dense"), open_storage(path)).user_attrs
    assert keys
    assert all("validation" in attributes[key] for key in keys)


def late(path: Path, trial: optuna.trial.BaseTrial) -> Any:
    held(path)
    raise RuntimeError("it has been said")


@pytest.mark.processes
def test_a_run_in_other_processes(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    rules = experiment(functools.partial(late, seen), workers=1, devices=2)
    sentence = "Waiting for a run in 2 processes to report ("
    with (
        hearing(sentence, seen.touch),
        pytest.raises(SubprocessError, match="it has been said"),
    ):
        fit_in_subprocess(rules, Method("dense"), {}, lambda figures: True, seed=0)


def test_no_line_of_a_storage_that_answers_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", notices.__name__):
        compare(tmp_path / "study.journal", trials=1)
    assert notices.__name__ not in {record.name for record in caplog.records}
