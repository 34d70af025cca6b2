"""A process that others took for dead, or that met a full disk, costs the study no result."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from lightning_gc.tuning import Method, StorageError, final_runs, open_storage, tune
from lightning_gc.tuning.comparison import Event
from lightning_gc.tuning.failure_detector import LEASE, FailureDetector, counts, owner
from lightning_gc.tuning.final_runs import finals_running, run_finals
from tests.support.fitting import unwarned
from tests.support.tuning import Bowl, Data, bowl, compare, experiment


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def fail_running(journal: Path) -> None:
    """Do what a process does that takes all others for dead."""
    study = optuna.load_study(study_name="toy/dense", storage=open_storage(journal))
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


class Victim(Bowl):
    """Is taken for dead at one moment of its life."""

    def __init__(self, x: float, moment: str, taken: Callable[[], None], fails: bool) -> None:
        super().__init__(x)
        self.moment, self.taken, self.fails = moment, taken, fails

    def on_train_start(self) -> None:
        if self.moment == "training":
            self.taken()
        if self.fails:
            raise RuntimeError("no memory")

    def on_train_end(self) -> None:
        if self.moment == "the end":
            self.taken()


@pytest.mark.parametrize(
    ("moment", "fails", "objective"),
    [
        ("drawing", False, "metric"),
        ("training", False, "metric"),
        ("training", True, "metric"),
        ("the end", False, "metric"),
        ("the end", False, "pareto"),
    ],
)
def test_its_trial_is_repeated_and_the_others_go_on(
    journal: Path, moment: str, fails: bool, objective: Any
) -> None:
    def build(trial: optuna.trial.BaseTrial) -> Any:
        if trial.number != 1:
            return bowl(trial)
        if moment == "drawing":
            fail_running(journal)
        x = trial.suggest_float("x", 0, 1)
        return Victim(x, moment, lambda: fail_running(journal), fails), Data()

    shown: list[Event] = []
    rules = experiment(build, trials=3, objective=objective)
    with unwarned():
        study = tune(rules, [], journal, finals=False, show=shown.append)["dense"]
    assert [event.kind for event in shown] == ["plan", "trial", "lost", "trial", "trial"]
    assert "trial 1: another process took this one for dead, so it is repeated" in shown[2].text
    complete, fail = TrialState.COMPLETE, TrialState.FAIL
    assert [trial.state for trial in study.trials] == [complete, fail, complete, complete]
    assert sum(map(counts, study.trials)) == 3


def test_a_trial_that_is_failed_while_it_is_told_is_repeated_too(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = optuna.Study.tell
    told: list[Any] = []

    def taken_before(study: optuna.Study, trial: Any, *args: Any, **kwargs: Any) -> Any:
        if not told:
            told.append(trial)
            fail_running(journal)
        return tell(study, trial, *args, **kwargs)

    monkeypatch.setattr(optuna.Study, "tell", taken_before)
    shown: list[Event] = []
    with unwarned():
        tune(experiment(trials=1), [], journal, finals=False, show=shown.append)
    assert [event.kind for event in shown] == ["plan", "lost", "trial"]


def test_ctrl_c_in_a_trial_that_was_taken_is_ctrl_c(journal: Path) -> None:
    def build(trial: optuna.trial.BaseTrial) -> Any:
        fail_running(journal)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(journal, build=build)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "full", "/cache"),
            r"Trial 1 of toy/dense found a disk full: .*/cache",
        ),
        (
            OSError(errno.EDQUOT, "full", "/cache"),
            r"Trial 1 of toy/dense found a disk full: .*/cache",
        ),
        (StorageError("j cannot be written"), "j cannot be written"),
        (optuna.exceptions.StorageInternalError("locked"), "The storage has failed: locked"),
    ],
)
def test_a_full_disk_or_storage_that_a_trial_meets_is_no_result(
    journal: Path, error: Exception, said: str
) -> None:
    """Though its failure could be written again a moment later."""

    def build(trial: optuna.trial.BaseTrial) -> Any:
        if trial.number == 1:
            raise error
        return bowl(trial)

    with pytest.raises(StorageError, match=said):
        compare(journal, build=build)
    study = compare(journal, build=build)["dense"]
    assert sum(map(counts, study.trials)) == 4
    assert not any("error" in trial.user_attrs for trial in study.trials)


DONE = {"source": "tuned", "seed": 0, "validation": 1.0, "test": 1.0, "diverged": False}
KEY = "final/tuned/0/0"


@pytest.fixture
def study() -> optuna.Study:
    study = optuna.create_study(study_name="toy/dense")
    study.tell(study.ask(), 1.0)
    return study


def finals(study: optuna.Study, detector: FailureDetector) -> Iterator[dict[str, Any]]:
    return run_finals(experiment(), Method("dense"), study, study, detector)


def test_a_final_run_that_another_has_done_stays_done(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[Callable[[float], None]] = []

    @contextlib.contextmanager
    def by_hand(write: Callable[[float], None]) -> Iterator[None]:
        beats.append(write)
        yield

    def train(*_: Any) -> float:
        beats[-1](7.0)
        assert study.user_attrs[KEY]["beat"] == 7.0
        study.set_user_attr(KEY, DONE)
        beats[-1](8.0)
        assert study.user_attrs[KEY] == DONE
        raise KeyboardInterrupt

    monkeypatch.setattr(final_runs, "heartbeat", by_hand)
    monkeypatch.setattr(final_runs, "train", train)
    with pytest.raises(KeyboardInterrupt):
        list(finals(study, FailureDetector()))
    assert study.user_attrs[KEY] == DONE


def test_a_final_run_on_another_host_is_waited_for_until_its_beat_has_stood_still(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(stopping: Any, trial: Any, seed: int) -> float:
        stopping.update({"loss": 1.0, "seconds": 0.0, "cpu_seconds": 0.0})
        return 5.0

    monkeypatch.setattr(final_runs, "train", train)
    now = [0.0]
    detector = FailureDetector(lambda: now[0])
    for beat in range(20):  # by a clock that is two weeks behind
        study.set_user_attr(KEY, {**owner(), "host": "elsewhere", "beat": -1e6 + beat})
        assert list(finals(study, detector)) == []
        assert finals_running(experiment(), Method("dense"), study, study)
        now[0] += LEASE
    while not (done := list(finals(study, detector))):
        now[0] += 20
    assert now[0] > 21 * LEASE - 20
    assert done[0]["test"] == 5.0
