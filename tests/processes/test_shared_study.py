"""Several processes share one study without losing or repeating a trial."""

import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lightning_gc import CompressionMonitor, TopK
from lightning_gc.tuning import Method, failure_detector, open_storage
from lightning_gc.tuning.failure_detector import begin_trial, counts
from lightning_gc.tuning.trial import SubprocessError, TrialCallback, fit_in_subprocess
from tests.support.fitting import ddp, fit
from tests.support.processes import hold_port, preloaded, run_in_processes
from tests.support.tuning import Bowl, Data, compare, experiment, steep, work


def dense(path: str) -> list[FrozenTrial]:
    storage = open_storage(path)
    trials = optuna.load_study(study_name="toy/dense", storage=storage).trials
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()
    return trials


def check_shares(known: list[FrozenTrial], shares: list[list[int]], trials: int) -> None:
    """Nothing twice, nothing lost, nobody idle."""
    good = [t for t in known if counts(t)]
    assert len(good) == trials
    assert {t.state for t in good} <= {TrialState.COMPLETE, TrialState.PRUNED}
    done = [number for share in shares for number in share]
    assert sorted(done) == sorted(t.number for t in good)
    assert len({t.params["x"] for t in good}) == trials
    assert all(shares)
    assert len({t.user_attrs["pid"] for t in good}) == len(shares)


@pytest.mark.processes
def test_two_processes_share_a_study_without_a_word(tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    shares = run_in_processes(work, 2, path, 12, tmp_path, 1, False)
    check_shares(dense(path), shares, 12)


@pytest.mark.processes
def test_one_is_killed_and_the_other_makes_up_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    (survivor,) = run_in_processes(work_or_die, 2, path, 10, tmp_path, wait_for=1)
    known = dense(path)
    (lost,) = [t for t in known if not counts(t)]
    assert lost.state == TrialState.FAIL
    assert len([t for t in known if counts(t)]) == 10
    assert len(survivor) == 9  # the other one has made one, and was in the middle of its second
    assert known[survivor[0]].user_attrs["pid"] != lost.user_attrs["pid"]


def work_or_die(worker: int, path: str, trials: int, folder: Path) -> list[int]:
    return work(worker, path, trials, folder, meetings=2, dies=worker == 1)


def test_whoever_asks_too_late_gives_the_trial_back(monkeypatch: pytest.MonkeyPatch) -> None:
    study = optuna.create_study()
    assert begin_trial(study, 1) is not None
    monkeypatch.setattr(
        failure_detector, "has_room", lambda *_: True
    )  # as seen before others asked
    assert begin_trial(study, 1) is None
    assert [counts(trial) for trial in study.trials] == [True, False]
    assert begin_trial(study, 2) is not None


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """A server's URL: that in the environment, or one that is started for the test."""
    given = os.environ.get("LIGHTNING_GC_POSTGRES")
    if given:
        yield given
        return
    places = [os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]  # Debian's
    initdb, server = (shutil.which(n, path=os.pathsep.join(places)) for n in ("initdb", "postgres"))
    if initdb is None or server is None:
        pytest.skip("no PostgreSQL: set LIGHTNING_GC_POSTGRES to a database's URL")
    folder = tmp_path / "pg"
    user: Any = {}
    if os.geteuid() == 0:  # it refuses to run as root
        user = {"user": "nobody"}
        for parent in tmp_path.parents:
            if parent.name.startswith(("pytest-", "popen-")):  # pytest's own folders
                parent.chmod(0o755)
        tmp_path.chmod(0o777)
    run = {"capture_output": True, "text": True, "timeout": 60, "check": False, **user}
    made = subprocess.run([initdb, "-D", folder, "-U", "me", "-A", "trust"], **run)
    if made.returncode:
        pytest.skip(f"initdb does not work here: {made.stderr}")
    held = hold_port()
    port = held.getsockname()[1]
    options: list[Any] = ["-D", folder, "-p", str(port), "-k", str(tmp_path), "-h", "127.0.0.1"]
    with subprocess.Popen([server, *options], stderr=subprocess.PIPE, text=True, **user) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready to accept connections" in line:
                break
        try:
            yield f"postgresql+psycopg://me@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # a fast shutdown: it waits for no client
            process.stderr.read()
            held.close()


@pytest.mark.processes
@pytest.mark.postgres
@pytest.mark.nightly
def test_two_processes_share_a_study_in_postgresql(postgres: str, tmp_path: Path) -> None:
    shares = run_in_processes(work, 2, postgres, 8, tmp_path, 1, False)
    check_shares(dense(postgres), shares, 8)


REAL = {"workers": 1, "devices": 2}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees grow from a process that has imported torch, where a user's import it anew."""
    context = preloaded()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


class EarlyStopping:
    """Hears the losses of a run, and lets it have three."""

    def __init__(self) -> None:
        self.heard: list[float] = []

    def __call__(self, figures: Mapping[str, float]) -> bool:
        self.heard.append(figures["loss"])
        return len(self.heard) < 3


ENDLESS = {**experiment().trainer, "max_epochs": 1000}


@pytest.mark.processes
def test_a_run_asks_its_parent_after_each_validation(quick: None) -> None:
    """And ends when it is told to. Here it has no workers that are processes."""
    judge, rules = EarlyStopping(), experiment(steep, trainer=ENDLESS, timeout=60.0)
    fit_in_subprocess(rules, Method("topk", fixed={"density": 0.1}), {"x": 0.5}, judge, seed=0)
    assert judge.heard == pytest.approx([0.04, 1.04, 2.04])


def obey(worker: int) -> tuple[list[float], int]:
    judge = EarlyStopping()
    settings = {**ENDLESS, "callbacks": [CompressionMonitor(), TrialCallback(judge)]}
    model = functools.partial(Bowl, slope=1.0)
    result = fit(ddp(TopK(0.1)), model, Data(), devices=2, **settings)
    return judge.heard, result["steps"]


@pytest.mark.processes
def test_one_of_several_workers_asks_and_all_obey() -> None:
    (asked, steps), (silent, as_many) = run_in_processes(obey, 2)
    assert asked == pytest.approx([0.04, 1.04, 2.04])
    assert silent == []
    assert steps == as_many == 3


@pytest.mark.nightly
@pytest.mark.processes
def test_trials_of_two_processes_are_judged_and_pruned_by_their_parent(tmp_path: Path) -> None:
    poor = Method("topk", fixed={"density": 0.1}, budget=1.0)
    rules: dict[str, Any] = {
        **REAL,
        "trials": 1,
        "patience": 2,
        "trainer": ENDLESS,
        "timeout": 90.0,
    }
    studies = compare(tmp_path / "journal", poor, build=steep, **rules)
    (patient,), (pruned,) = studies["dense"].trials, studies["topk"].trials
    assert (patient.state, pruned.state) == (TrialState.COMPLETE, TrialState.PRUNED)
    # One epoch more than was judged would show in the curve: the workers wait for the answer.
    x = patient.params["x"]
    assert patient.user_attrs["curve"] == pytest.approx([(x - 0.3) ** 2 + i for i in range(3)])
    assert patient.user_attrs["wire_bytes"] == patient.user_attrs["dense_bytes"] > 0
    assert pruned.user_attrs["epochs"] == 1
    assert pruned.user_attrs["ratio"] > 2
    assert "the budget is 1" in pruned.user_attrs["reason"]


def failing(trial: optuna.trial.BaseTrial) -> Any:
    raise RuntimeError("no such data")


def silent(trial: optuna.trial.BaseTrial) -> Any:
    import time

    time.sleep(600)


def dying(trial: optuna.trial.BaseTrial) -> Any:
    os._exit(7)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("build", "timeout", "said"),
    [
        (failing, 60.0, "RuntimeError: no such data"),
        (dying, 60.0, "ended with code 7"),
        (silent, 4.0, "silent for 4 s and was killed"),
    ],
)
def test_a_tree_that_fails_dies_or_hangs_is_an_error(
    quick: None, build: Any, timeout: float, said: str
) -> None:
    rules = experiment(build, **REAL, timeout=timeout)
    with pytest.raises(SubprocessError, match=said):
        fit_in_subprocess(rules, Method("dense"), {}, lambda figures: True, seed=0)
