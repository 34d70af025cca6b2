"""One trial of a study, from its claim to its last word."""

from __future__ import annotations

import math
from typing import Any

import optuna
from optuna.trial import TrialState

from lightning_gc.tuning import trial_leases
from lightning_gc.tuning.early_stopping import Judge, MissingMetric
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.parameter_space import MEMORY_PREFIX, PREFIX, draw
from lightning_gc.tuning.subprocess_trial import fit_in_tree
from lightning_gc.tuning.training_run import fit


class TrialError(RuntimeError):
    """A run has failed in a way that looks like a mistake in the program."""


def run_trial(
    experiment: Experiment, method: Method, study: optuna.Study, trial: optuna.Trial
) -> None:
    """Train with what the trial draws and tell the study what has come of it.

    A run that diverges is a result: the trial fails, with its parameters and the reason, and
    counts. So does an error, once a trial of this study has got through.

    Raises:
        TrialError: an error in the first trials of a study.
        MissingMetric: the metric was not logged.
        KeyboardInterrupt: the user has had enough. The trial is given up and does not count.
    """
    judge = Judge(experiment, method, trial)
    try:
        with trial_leases.beating(lambda now: trial.set_user_attr("beat", now)):
            train(experiment, method, trial, judge, experiment.seed)
        if not judge.curve:
            raise MissingMetric(
                f"No validation was run, so there is no {experiment.metric!r} to select on. Give "
                f"the model a validation_step and the data a val_dataloader."
            )
    except (MissingMetric, KeyboardInterrupt, SystemExit):
        study.tell(trial, state=TrialState.FAIL)
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        trial.set_user_attr("error", said)
        study.tell(trial, state=TrialState.FAIL)
        through = (TrialState.COMPLETE, TrialState.PRUNED)
        if not study.get_trials(deepcopy=False, states=through):
            raise TrialError(
                f"Trial {trial.number} of {study.study_name} failed before any has got through. "
                f"{said} Its parameters were {trial.params}."
            ) from error
        return
    _conclude(experiment, study, trial, judge)


def train(
    experiment: Experiment,
    method: Method,
    trial: optuna.trial.BaseTrial,
    judge: Judge,
    seed: int,
    final: bool = False,
) -> float | None:
    """Train here, or in a tree of processes; return the test metric of a final run."""
    if experiment.devices == 1:
        return fit(experiment, method, trial, judge.hear, seed, final)
    # The study is not for other processes to talk to: every value is drawn here.
    draw(trial, method.tuned, PREFIX)
    draw(trial, method.tuned_memory, MEMORY_PREFIX)
    getattr(experiment.build, "draw", experiment.build)(trial)
    return fit_in_tree(experiment, method, trial.params, judge.hear, seed, final)


def _conclude(
    experiment: Experiment, study: optuna.Study, trial: optuna.Trial, judge: Judge
) -> None:
    record: dict[str, Any] = {**judge.record(), "seed": experiment.seed}
    if judge.budget is not None:
        record["over_budget"] = judge.over_budget
        if hasattr(trial, "set_constraint"):  # since Optuna 5; feasible where 0 or less
            trial.set_constraint("budget", judge.over_budget)
    for name, value in record.items():
        trial.set_user_attr(name, value)
    if judge.verdict == "diverged":
        trial.set_user_attr("error", f"diverged: {judge.reason}")
        study.tell(trial, state=TrialState.FAIL)
    elif judge.verdict == "pruned":
        study.tell(trial, state=TrialState.PRUNED)
    elif experiment.objective == "pareto":
        study.tell(trial, [judge.best, math.log10(max(record["wire_bytes"], 1.0))])
    else:
        study.tell(trial, judge.best)
