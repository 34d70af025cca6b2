"""Run one trial, in this process or in subprocesses, and tell the study its result."""

from __future__ import annotations

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
from lightning_gc.flavours import public_class
from lightning_gc.lightning.ddp import CompressedDDP
from lightning_gc.lightning.local_steps_strategy import RealLocalSteps
from lightning_gc.lightning.monitor import Monitor
from lightning_gc.lightning.simulation.ddp import SimulatedDDP
from lightning_gc.lightning.simulation.simulated_local_steps import SimulatedLocalSteps
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method
from lightning_gc.tuning.early_stopping import (
    TOTAL,
    BestTracker,
    EarlyStopping,
    MissingMetric,
    look_up,
)
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.failure_detector import heartbeat
from lightning_gc.tuning.journal import StorageError


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


# Arguments of the Trainer that its tests need as well.
_TEST_ARGUMENTS = ("accelerator", "precision", "plugins", "limit_test_batches")


def fit(
    experiment: Experiment,
    method: Method,
    trial: optuna.trial.BaseTrial,
    ask: Ask,
    seed: int,
    final: bool = False,
) -> float | None:
    """Train one model and return the test metric of a final run.

    Args:
        experiment: the rules.
        method: how gradients are exchanged.
        trial: source of the hyper-parameters.
        ask: decides after each validation whether training continues.
        seed: of weights, order of data, and the compressor's random numbers.
        final: restore the best epoch's weights, and test them.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
        MissingMetric: the test metric was not logged.
    """
    pl.seed_everything(seed, verbose=False)
    compressor = method.suggest_compressor(trial)
    model, data, *more = experiment.build(trial)
    arguments = {**experiment.trainer, **(more[0] if more else {})}
    experiment.check_trainer(arguments)
    parts: dict[str, Any] = {
        "memory": method.suggest_memory(trial),
        "scheme": method.scheme,
        "controller": method.controller,
        "seed": seed,
    }
    rounds = method.suggest_rounds(trial)
    real, simulated = public_class(CompressedDDP), public_class(SimulatedDDP)
    if rounds is not None:
        real, simulated = public_class(RealLocalSteps), public_class(SimulatedLocalSteps)
        parts |= rounds.arguments
    if experiment.devices > 1:
        strategy = real(compressor, start_method="spawn", **parts)
    else:
        parts |= {"workers": experiment.workers, "network": experiment.network}
        strategy = simulated(compressor, **parts)
    ours = TrialCallback(ask, experiment if final else None)
    given = arguments.pop("callbacks", None) or []
    callbacks = given if isinstance(given, list) else [given]
    quiet: dict[str, Any] = {
        "logger": _NoLogger(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        **(quiet | arguments),
        strategy=strategy,
        devices=experiment.devices,
        enable_checkpointing=False,
        callbacks=[*callbacks, public_class(Monitor)(), ours],
    )
    _train(trainer, ours, model, data)
    if not final or experiment.test_metric is None:
        return None
    kept = {name: arguments[name] for name in _TEST_ARGUMENTS if name in arguments}
    tester = pl.Trainer(**(quiet | kept), devices=1, enable_checkpointing=False)
    tester.test(model, data, verbose=False)
    return look_up(experiment.test_metric, tester.callback_metrics, "test metric", "test_step")


def _train(trainer: pl.Trainer, callback: TrialCallback, model: Any, data: Any) -> None:
    # After Ctrl-C Lightning ignores further ones for ever and exits the process.
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(model, data)
    except SystemExit:
        if not callback.interrupted:
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


class _NoLogger(pl.loggers.logger.DummyLogger):
    """Logs nothing: results go into the study."""


Ask = Callable[[Mapping[str, float]], bool]
"""``(logged metrics) -> whether training continues``."""


class TrialCallback(pl.Callback):
    """Callback that asks after each epoch with a validation whether training continues.

    Worker 0 asks and all obey. It must come after the monitor in the list of callbacks, because it
    passes on the monitor's metrics. If the last epoch has no validation, it passes on the totals.

    Args:
        ask: receives all logged metrics, the epoch's ``seconds`` of training, and its
            ``cpu_seconds``: CPU time of the process over its workers. At the end of training it
            receives the totals alone, and its answer is ignored.
        best_of: restore the weights of the best epoch at the end; None keeps the last weights.

    Attributes:
        interrupted: the user pressed Ctrl-C; Lightning turns it into an exit.
    """

    def __init__(self, ask: Ask, best_of: Experiment | None = None) -> None:
        self.ask = ask
        self.interrupted = False
        self._tracker = BestTracker(best_of) if best_of is not None else None
        self._weights: dict[str, Any] | None = None
        self._starts = self._spent = 0.0, 0.0  # wall clock and CPU time
        self._validated = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clocks."""
        self._starts, self._validated = _clocks(), False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clocks; of several validations the last one counts."""
        (wall, cpu), (wall_start, cpu_start) = _clocks(), self._starts
        self._spent = wall - wall_start, cpu - cpu_start

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record that there are new metrics."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask, stop, and copy the best weights."""
        if not self._validated:
            return
        go_on, better, tracker = True, True, self._tracker
        strategy: Any = trainer.strategy
        if trainer.is_global_zero:
            logged = _logged(trainer)
            seconds, cpu = self._spent
            times = {"seconds": seconds, "cpu_seconds": cpu / len(strategy.engines)}
            go_on = self.ask(logged | times)
            if tracker is not None:
                value = logged.get(tracker.experiment.metric, math.nan)
                better = math.isfinite(value) and tracker.add(value) == 0
        if tracker is not None and strategy.reduce_boolean_decision(better):
            weights = pl_module.state_dict()
            self._weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if not strategy.reduce_boolean_decision(go_on):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pass on the totals of epochs without a validation; restore the best weights."""
        if trainer.is_global_zero and not self._validated:
            self.ask({n: v for n, v in _logged(trainer).items() if n.startswith(TOTAL)})
        if self._weights is not None:
            pl_module.load_state_dict(self._weights)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Record whether the exception is Ctrl-C."""
        self.interrupted = isinstance(exception, KeyboardInterrupt)


def _logged(trainer: pl.Trainer) -> dict[str, float]:
    return {n: float(v) for n, v in trainer.callback_metrics.items() if v.numel() == 1}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
