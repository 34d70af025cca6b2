"""Run one trial, in this process or in subprocesses, and tell the study its result."""

import contextlib
import errno
import functools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState

from lightning_gc.core.notices import waiting
from lightning_gc.methods.method import Method
from lightning_gc.tuning.early_stopping import EarlyStopping, MissingMetric
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.failure_detector import heartbeat
from lightning_gc.tuning.journal import StorageError
from lightning_gc.tuning.training_run import Ask, fit


class TrialError(RuntimeError):
    """A run has failed in a way that looks like a bug in the program."""


def run_trial(
    experiment: Experiment, method: Method, study: optuna.Study, trial: optuna.Trial
) -> bool:
    """Train with the trial's hyper-parameters and tell the study the result.

    A run that diverges counts as a failed trial, with the reason. So does an error, once a trial of
    this study has completed or been pruned.

    Returns:
        Whether the study has accepted the result. If another process took this one for dead, the
        trial has failed and is repeated.

    Raises:
        TrialError: an error in the first trials of a study.
        MissingMetric: the metric was not logged.
        StorageError: the storage, or a disk, is full or down. The trial does not count.
        KeyboardInterrupt: the user pressed Ctrl-C. The trial fails and does not count.
    """
    try:
        _run(experiment, method, study, trial)
    except UpdateFinishedTrialError:
        return False
    return True


def _run(experiment: Experiment, method: Method, study: optuna.Study, trial: optuna.Trial) -> None:
    stopping = EarlyStopping(experiment, method, trial)
    try:
        with heartbeat(lambda now: trial.set_user_attr("beat", now)):
            train(stopping, trial, experiment.seed)
        if not stopping.curve:
            raise MissingMetric(
                f"No validation was run, so {experiment.metric!r} is missing. Give the model a "
                f"validation_step and the data a val_dataloader."
            )
    except (MissingMetric, KeyboardInterrupt, SystemExit, StorageError, StorageInternalError):
        _give_up(study, trial)
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _give_up(study, trial)
            raise StorageError(
                f"Trial {trial.number} of {study.study_name} found a disk full: {error}. Finished "
                f"trials are kept. Free some space, then repeat the command."
            ) from error
        text = f"{type(error).__name__}: {error}"
        trial.set_user_attr("error", text)
        _finish(study, trial, TrialState.FAIL)
        through = (TrialState.COMPLETE, TrialState.PRUNED)
        if not study.get_trials(deepcopy=False, states=through):
            raise TrialError(
                f"Trial {trial.number} of {study.study_name} failed before any has succeeded. "
                f"{text} Its parameters were {trial.params}."
            ) from error
        return
    _tell(study, trial, stopping)


def train(stopping: EarlyStopping, trial: optuna.trial.BaseTrial, seed: int) -> float | None:
    """Train here, or in subprocesses; return the test metric of a final run."""
    experiment, method, final = stopping.experiment, stopping.method, stopping.trial is None
    if experiment.devices == 1:
        return fit(experiment, method, trial, stopping.update, seed, final)
    # Other processes have no access to the study: every value is drawn here.
    method.suggest_compressor(trial)
    method.suggest_memory(trial)
    method.suggest_rounds(trial)
    getattr(experiment.build, "suggest", experiment.build)(trial)
    return fit_in_subprocess(experiment, method, trial.params, stopping.update, seed, final)


def _tell(study: optuna.Study, trial: optuna.Trial, stopping: EarlyStopping) -> None:
    record: dict[str, Any] = {**stopping.record(), "seed": stopping.experiment.seed}
    if stopping.budget is not None:
        record["over_budget"] = stopping.over_budget
        if hasattr(trial, "set_constraint"):  # since Optuna 5; feasible where 0 or less
            trial.set_constraint("budget", stopping.over_budget)
    if stopping.outcome == "diverged":
        record["error"] = f"diverged: {stopping.reason}"
    for name, value in record.items():
        trial.set_user_attr(name, value)
    if stopping.outcome != "complete":
        ended = {"diverged": TrialState.FAIL, "pruned": TrialState.PRUNED}
        _finish(study, trial, ended[stopping.outcome])
    elif stopping.experiment.objective == "pareto":
        size = math.log10(max(stopping.bytes_so_far, 1.0))
        _finish(study, trial, TrialState.COMPLETE, [stopping.best, size])
    else:
        _finish(study, trial, TrialState.COMPLETE, [stopping.best])


def _finish(
    study: optuna.Study,
    trial: optuna.Trial,
    state: TrialState,
    values: Sequence[float] | None = None,
) -> None:
    told = study.tell(trial, values, state, skip_if_finished=True)
    if told.state != state:
        raise UpdateFinishedTrialError(f"Trial {trial.number} was finished by another process.")


def _give_up(study: optuna.Study, trial: optuna.Trial) -> None:
    """Mark a trial as failed, so that it is repeated; if that fails, it is repeated anyway."""
    unable = (StorageError, StorageInternalError, UpdateFinishedTrialError)
    with contextlib.suppress(*unable):
        study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


_PAUSE = 0.02  # seconds between two looks for a file


class SubprocessError(RuntimeError):
    """A run in subprocesses has failed."""


def fit_in_subprocess(
    experiment: Experiment,
    method: Method,
    params: Mapping[str, Any],
    ask: Ask,
    seed: int,
    final: bool = False,
) -> float | None:
    """Run ``fit`` in a fresh process with hyper-parameters drawn before.

    Raises:
        SubprocessError: the run has failed, ended without a result, or been silent for longer than
            ``experiment.timeout``; none of its processes is left.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lightning_gc_") as name:
        folder = Path(name)
        trial = optuna.trial.FixedTrial(dict(params))
        run = functools.partial(fit, experiment, method, trial, _AskByFile(folder), seed, final)
        process = context.Process(target=_run_child, args=(run, folder))
        process.start()
        try:
            number = 0
            while True:
                with waiting(f"Waiting for a run in {experiment.devices} processes to report"):
                    message = _receive(process, folder, number, experiment.timeout)
                if "error" in message:
                    raise SubprocessError(message["error"])
                if "result" in message:
                    result: float | None = message["result"]
                    return result
                _write(folder / f"answer-{number}", ask(message["logged"]))
                number += 1
        finally:
            _kill_group(process)


@dataclass
class _AskByFile:
    """Asks the parent. Is pickled for the workers, so it holds plain values only."""

    folder: Path
    asked: int = 0

    def __call__(self, logged: Mapping[str, float]) -> bool:
        _write(self.folder / f"message-{self.asked}", {"logged": dict(logged)})
        answer = self.folder / f"answer-{self.asked}"
        self.asked += 1
        while not answer.exists():
            time.sleep(_PAUSE)
        return bool(json.loads(answer.read_text()))


def _run_child(run: Callable[[], float | None], folder: Path) -> None:
    """Run in the child, as leader of a process group that can be killed at once."""
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    message: dict[str, Any]
    try:
        message = {"result": run()}
    except BaseException as error:
        message = {"error": f"{type(error).__name__}: {error}"}
    # Its number is not known here: workers have copies of the counter.
    _write(folder / "last", message)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _receive(process: Any, folder: Path, number: int, timeout: float) -> dict[str, Any]:
    """Wait for the child's message with this number, or its last one."""
    deadline = time.monotonic() + timeout
    while True:
        alive = process.is_alive()  # read first: the last message is written before the end
        for path in (folder / f"message-{number}", folder / "last"):
            if path.exists():
                message: dict[str, Any] = json.loads(path.read_text())
                return message
        if not alive:
            raise SubprocessError(f"The process of the run has ended with code {process.exitcode}.")
        if time.monotonic() > deadline:
            raise SubprocessError(f"The run has been silent for {timeout:g} s and was killed.")
        time.sleep(_PAUSE)


def _kill_group(process: Any) -> None:
    """Kill the child and all processes that it has started."""
    try:
        # Its group exists once it has called setsid; until then it has started nothing.
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.kill()
    process.join()


def _write(path: Path, what: Any) -> None:
    """Write a file atomically."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(what))
    hidden.rename(path)
