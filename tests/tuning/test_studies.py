"""Studies resume, prune, record divergence, keep budgets, and refuse changed rules."""

import dataclasses
import gc
import signal
import warnings
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.compressors import Range
from lightning_gc.tuning import Method, MissingMetric, StorageError, TrialError, open_storage, tune
from lightning_gc.tuning.comparison import Event
from lightning_gc.tuning.failure_detector import counts
from lightning_gc.tuning.final_runs import RETURNED, TRANSFERRED, TUNED, final_records
from lightning_gc.tuning.studies import PerTrialSampler, best_trial
from tests.support.fitting import unwarned
from tests.support.tuning import (
    Bowl,
    Data,
    bowl,
    cliff,
    compare,
    denser,
    experiment,
    hasten,
    steep,
)

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def params(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials if counts(trial)]


def test_every_method_has_a_study_with_as_many_trials_and_dense_comes_first(journal: Path) -> None:
    shown: list[Event] = []
    with unwarned():
        studies = tune(experiment(seed=4), ["topk", "cast"], journal, show=shown.append)
    assert list(studies) == ["dense", "topk", "cast"]
    assert [len(study.trials) for study in studies.values()] == [4, 4, 4]
    assert set(studies["dense"].best_params) == {"x"}
    assert set(studies["topk"].best_params) == {"x", "compressor.density"}
    assert set(studies["cast"].best_params) == {"x", "compressor.dtype"}
    # A winner is run with its own hyper-parameters and with dense's, and dense with the winner's:
    # one seed each. TopK's winner has dense's, so it is run once.
    dense = studies["dense"]
    (alone,) = final_records(studies["topk"], dense)
    own, moved, returned = final_records(studies["cast"], dense)
    assert [alone["params"], own["params"]] == [studies[n].best_params for n in ("topk", "cast")]
    assert alone["params"]["x"] == dense.best_params["x"] != own["params"]["x"]
    sources = [each["source"] for each in (alone, own, moved, returned)]
    assert sources == [TUNED, TUNED, TRANSFERRED, RETURNED]
    assert moved["params"] == own["params"] | dense.best_params
    assert returned["params"] == {"x": own["params"]["x"]}
    assert own["test"] == pytest.approx((own["params"]["x"] - 0.3) ** 2 + 100)
    assert [returned["test"], returned["ratio"]] == [own["test"], 1]
    assert [e.kind for e in shown] == ["plan"] + ["trial"] * 12 + ["final"] * 5
    works = [event.workload for event in shown if event.workload is not None]
    assert [work.done for work in works] == list(range(18))
    assert [works[i].runs for i in (0, -1)] == [19, 17]
    assert works[0].seconds is None
    assert "4 trials, then 7 final runs" in shown[0].text
    assert "unknown until the first trial has ended" in shown[0].text
    assert works[-1].seconds == 0
    assert all(work.seconds for work in works[1:-1])
    trial = best_trial(studies["topk"])
    assert trial is not None
    assert trial.user_attrs["ratio"] > 2
    assert trial.user_attrs["per_step"]["communication_seconds_estimated"] > 0


def test_what_is_done_is_not_done_again_and_more_trials_go_on(journal: Path) -> None:
    (first,) = compare(journal, finals=True).values()
    again = compare(journal, finals=True)["dense"]
    assert params(again) == params(first)
    assert len(compare(journal, trials=6)["dense"].trials) == 6


def test_an_interrupted_study_goes_on_with_the_draws_it_would_have_made(
    journal: Path, tmp_path: Path
) -> None:
    asked: list[int] = []

    def interrupted(trial: optuna.trial.BaseTrial) -> Any:
        asked.append(trial.number)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return bowl(trial)

    with pytest.raises(KeyboardInterrupt):
        compare(journal, build=interrupted)
    study = compare(journal)["dense"]
    assert states(study) == [COMPLETE, COMPLETE, FAIL, COMPLETE, COMPLETE]
    assert sum(map(counts, study.trials)) == 4
    # Draws depend on the trial's number alone: those after the lost one are one further on.
    whole = compare(tmp_path / "whole.journal", trials=5)["dense"]
    assert [t.params for t in study.trials if t.number != 2] == [
        t.params for t in whole.trials if t.number != 2
    ]


def test_ctrl_c_during_training_is_not_lightnings_exit(journal: Path) -> None:
    class Impatient(Bowl):
        def on_train_start(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(journal, build=lambda trial: (Impatient(trial.suggest_float("x", 0, 1)), Data()))
    assert len(compare(journal)["dense"].trials) == 5


def test_trials_of_dead_processes_are_made_up(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasten(monkeypatch)
    study = compare(journal, trials=1)["dense"]
    for changes in ({}, {"host": "elsewhere"}):
        trial = study.ask()
        known = {**study.trials[0].user_attrs, "pid": 2**22 + 1, **changes}
        for name in ("host", "pid", "born", "beat"):
            trial.set_user_attr(name, known[name])
    study = compare(journal, trials=3)["dense"]
    assert states(study) == [COMPLETE, FAIL, FAIL, COMPLETE, COMPLETE]


def test_a_trial_that_diverges_fails_with_its_parameters_and_the_study_goes_on(
    journal: Path,
) -> None:
    study = compare(journal, build=cliff, trials=8)["dense"]
    failed = [t for t in study.trials if t.state == FAIL]
    assert failed
    assert all(t.params["x"] > 0.5 and "loss is nan" in t.user_attrs["error"] for t in failed)
    assert len(study.trials) == 8
    assert study.best_params["x"] <= 0.5


def test_an_error_before_any_success_stops_and_later_ones_are_recorded(journal: Path) -> None:
    def broken(trial: optuna.trial.BaseTrial) -> Any:
        if trial.suggest_float("x", 0, 1) >= 0 and trial.number in fails:
            raise RuntimeError("no memory")
        return bowl(trial)

    fails = {0}
    with pytest.raises(TrialError, match=r"toy/dense failed .* no memory .*'x'"):
        compare(journal, build=broken)
    fails = {2}
    study = compare(journal, build=broken)["dense"]
    assert states(study) == [FAIL, COMPLETE, FAIL, COMPLETE]
    assert study.trials[2].user_attrs["error"] == "RuntimeError: no memory"


def test_hopeless_trials_are_pruned_where_the_pruner_says_so(journal: Path) -> None:
    trainer = {**experiment().trainer, "max_epochs": 3}
    quick: dict[str, Any] = {"trainer": trainer, "warmup": 1, "trials": 9}
    study = compare(journal, build=bowl, **quick)["dense"]
    pruned = [t for t in study.trials if t.state == PRUNED]
    assert pruned
    assert all(t.user_attrs["epochs"] == 2 for t in pruned)
    best = study.best_value
    assert all(t.value > best for t in pruned)
    patient = compare(journal.with_name("patient"), build=bowl, pruner="none", **quick)["dense"]
    assert states(patient) == [COMPLETE] * 9


def test_patience_ends_a_run_and_the_best_epoch_counts(journal: Path) -> None:
    trainer = {**experiment().trainer, "max_epochs": 9}
    study = compare(journal, build=steep, trials=1, patience=2, trainer=trainer)["dense"]
    (trial,) = study.trials
    assert trial.state == COMPLETE
    assert (trial.user_attrs["epochs"], trial.user_attrs["best_epoch"]) == (3, 0)
    assert trial.value == pytest.approx((trial.params["x"] - 0.3) ** 2)


def wide(**changes: Any) -> Method:
    return Method("topk", space=(Range("density", 1e-3, 0.9, scale="log"),), **changes)


def test_under_a_budget_the_best_is_the_best_that_keeps_to_it(journal: Path) -> None:
    free = compare(journal, wide(), build=denser, trials=12, pruner="none")["topk"]
    allowed = sorted(t.user_attrs["wire_bytes"] for t in free.trials)[5]
    study = compare(
        journal.with_name("b"), wide(budget=allowed), build=denser, trials=12, pruner="none"
    )["topk"]
    # The draws are the same, so it is known who keeps to the budget and which of these is best.
    fits = [t for t in free.trials if t.user_attrs["wire_bytes"] <= allowed]
    assert 0 < len(fits) < 12
    winner = best_trial(study)
    assert winner is not None
    assert winner.number == min(fits, key=lambda t: t.value).number
    assert winner.number != free.best_trial.number
    over = [t for t in study.trials if t not in fits and t.state == PRUNED]
    assert {t.number for t in study.trials} - {t.number for t in fits} == {t.number for t in over}
    assert all("the budget is" in t.user_attrs["reason"] for t in over)
    assert [t.number for t in study.trials if max(t.constraints.values()) <= 0] == [
        t.number for t in fits
    ]


def test_against_bytes_the_front_is_where_less_costs_more(journal: Path) -> None:
    studies = compare(journal, wide(), build=denser, trials=12, objective="pareto")
    study = studies["topk"]
    assert states(study) == [COMPLETE] * 12
    front = {t.number for t in study.best_trials}

    def is_beaten(trial: FrozenTrial) -> bool:
        return any(
            all(a <= b for a, b in zip(t.values, trial.values, strict=True))
            and t.values != trial.values
            for t in study.trials
        )

    assert front == {t.number for t in study.trials if not is_beaten(t)}
    assert min(study.trials, key=lambda t: t.values[0]).number in front
    assert min(study.trials, key=lambda t: (t.values[1], t.values[0])).number in front
    assert len(front) < 12


def distances(kind: str) -> list[float]:
    """Return how far from the optimum the draws of a study of 40 trials are."""
    sampler = PerTrialSampler(kind, seed=0, pareto=False)
    study = optuna.create_study(study_name="toy/dense", sampler=sampler)
    for _ in range(40):
        trial = study.ask()
        study.tell(trial, (trial.suggest_float("x", 0, 1) - 0.3) ** 2)
    return [abs(trial.params["x"] - 0.3) for trial in study.trials]


def test_the_first_trial_of_a_method_has_denses_hyper_parameters(journal: Path) -> None:
    """And the method's own fields at their defaults; later draws are as they were without it."""
    studies = compare(journal, wide(), trials=3)
    dense, topk = studies["dense"], studies["topk"]
    first, *others = params(topk)
    assert first == {"x": dense.best_params["x"], "compressor.density": 0.01}
    assert all(each["x"] != first["x"] for each in others)
    assert params(compare(journal, wide(), trials=4)["topk"])[:3] == [first, *others]


def test_a_candidate_whose_process_died_is_tried_again(journal: Path) -> None:
    asked: list[int] = []

    def interrupted(trial: optuna.trial.BaseTrial) -> Any:
        asked.append(trial.number)
        if len(asked) == 4:  # the first trial of the second study
            raise KeyboardInterrupt
        return bowl(trial)

    with pytest.raises(KeyboardInterrupt):
        compare(journal, wide(), build=interrupted, trials=3)
    studies = compare(journal, wide(), trials=3)
    assert states(studies["topk"])[0] == FAIL
    assert params(studies["topk"])[0]["x"] == studies["dense"].best_params["x"]


def test_a_default_outside_of_its_range_is_drawn(journal: Path) -> None:
    narrow = Method("topk", space=(Range("density", 0.1, 0.2),))
    (first,) = params(compare(journal, narrow, trials=1)["topk"])
    assert 0.1 <= first["compressor.density"] <= 0.2


def test_tpe_learns_where_random_draws_do_not() -> None:
    tpe, random = distances("tpe"), distances("random")
    assert tpe[:10] == random[:10]  # nothing to learn from yet
    assert sum(tpe[20:]) < sum(random[20:]) / 2


def test_one_name_is_one_set_of_rules(journal: Path) -> None:
    compare(journal, "topk", trials=1)
    narrow = Method("topk", space=(Range("density", 0.1, 0.2),))
    with pytest.raises(ValueError, match=r"'toy/topk' exists with space\.density=.*give the exp"):
        compare(journal, narrow, trials=1)
    with pytest.raises(ValueError, match=r"exists with workers=2, but is requested with workers=4"):
        compare(journal, trials=1, workers=4)
    with pytest.raises(ValueError, match="Two methods are called 'topk'"):
        compare(journal, "topk", narrow)


def test_a_metric_that_is_never_logged_is_named_and_costs_no_trial(journal: Path) -> None:
    wrong = dataclasses.replace(experiment(), metric="perplexity")
    with (
        unwarned(),
        pytest.raises(MissingMetric, match=r"'perplexity' was not .* loss, other"),
    ):
        tune(wrong, [], journal)
    with unwarned(), pytest.raises(MissingMetric, match="'tset' was not logged"):
        tune(experiment(test_metric="tset"), [], journal.with_name("second"))

    class Blind(Bowl):
        validation_step = None  # type: ignore[assignment]

    with pytest.raises(MissingMetric, match="No validation was run"):
        compare(journal.with_name("third"), build=lambda trial: (Blind(), Data()))


def test_a_trainer_argument_that_clashes_is_refused_wherever_it_comes_from(journal: Path) -> None:
    clash = {"accumulate_grad_batches": 3}
    with pytest.raises(TrialError, match=r"accumulate_grad_batches=3 with workers=2"):
        compare(journal, build=lambda trial: (*bowl(trial), clash))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("postgresql://me:secret@127.0.0.1:1/none", r"postgresql://me@127\.0\.0\.1:1/none cannot"),
        ("nonsense://x", "is not the URL of a database"),
        ("mysql://me@host/none", "needs a driver|cannot be used"),
    ],
)
def test_a_storage_that_is_down_is_said_without_its_password(where: str, said: str) -> None:
    with pytest.raises((StorageError, ValueError), match=said) as caught:
        open_storage(where)
    assert "secret" not in str(caught.value)


# Optuna leaves the connection of a storage that it refuses open, of which Python 3.13 warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_storage_of_another_schema_is_refused(tmp_path: Path) -> None:
    import sqlite3

    url = f"sqlite:///{tmp_path}/other.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = open_storage(url)
    assert isinstance(storage, RDBStorage)
    storage.engine.dispose()
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("update version_info set schema_version = 1, library_version = '0.1'")
        connection.execute("update alembic_version set version_num = 'v0.9.0.a'")
    connection.close()
    with pytest.raises(StorageError, match="version of Optuna that made it"):
        open_storage(url)
    gc.collect()  # here, not in another test


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_heard_after_the_trial(journal: Path) -> None:
    class Dropping:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # printed and forgotten in a destructor

    def build(trial: optuna.trial.BaseTrial) -> Any:
        if trial.number == 1:
            Dropping()
        return bowl(trial)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        compare(journal, build=build)
    assert signal.getsignal(signal.SIGINT) is handler
    study = compare(journal)["dense"]
    assert len(study.trials) == 4
