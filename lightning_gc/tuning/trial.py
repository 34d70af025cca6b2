"""Run one trial and tell the study its result."""

from __future__ import annotations

import math
from typing import Any

import optuna
from optuna.trial import TrialState

from lightning_gc.tuning import trial_leases
from lightning_gc.tuning.early_stopping import EarlyStopping, MissingMetric
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.subprocess_trial import fit_in_subprocess
from lightning_gc.tuning.training_run import fit


class TrialError(RuntimeError):
    """A run has failed in a way that looks like a bug in the program."""


def run_trial(
    experiment: Experiment, method: Method, study: optuna.Study, trial: optuna.Trial
) -> None:
    """Train with the trial's hyper-parameters and tell the study the result.

    A run that diverges counts as a failed trial, with the reason. So does an error, once a trial of
    this study has completed or been pruned.

    Raises:
        TrialError: an error in the first trials of a study.
        MissingMetric: the metric was not logged.
        KeyboardInterrupt: the user pressed Ctrl-C. The trial fails and does not count.
    """
    stopping = EarlyStopping(experiment, method, trial)
    try:
        with trial_leases.heartbeat(lambda now: trial.set_user_attr("beat", now)):
            train(stopping, trial, experiment.seed)
        if not stopping.curve:
            raise MissingMetric(
                f"No validation was run, so there is no {experiment.metric!r}. Give the model a "
                f"validation_step and the data a val_dataloader."
            )
    except (MissingMetric, KeyboardInterrupt, SystemExit):
        study.tell(trial, state=TrialState.FAIL)
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        trial.set_user_attr("error", text)
        study.tell(trial, state=TrialState.FAIL)
        through = (TrialState.COMPLETE, TrialState.PRUNED)
        if not study.get_trials(deepcopy=False, states=through):
            raise TrialError(
                f"Trial {trial.number} of {study.study_name} failed before any has got through. "
                f"{text} Its parameters were {trial.params}."
            ) from error
        return
    _tell(study, trial, stopping)


def train(stopping: EarlyStopping, trial: optuna.trial.BaseTrial, seed: int) -> float | None:
    """Train here, or in processes of its own; return the test metric of a final run."""
    experiment, method, final = stopping.experiment, stopping.method, stopping.trial is None
    if experiment.devices == 1:
        return fit(experiment, method, trial, stopping.update, seed, final)
    # Other processes have no access to the study: every value is drawn here.
    method.suggest_compressor(trial)
    method.suggest_memory(trial)
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
        study.tell(trial, state=ended[stopping.outcome])
    elif stopping.experiment.objective == "pareto":
        study.tell(trial, [stopping.best, math.log10(max(record["wire_bytes"], 1.0))])
    else:
        study.tell(trial, stopping.best)
