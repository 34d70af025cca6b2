"""Leases on trials: several processes share a study through its storage alone.

Each running trial holds its process and a heartbeat. A failed trial with an ``error`` is a result,
such as a diverged run, and counts; one without was lost with its process, and is made up for.
"""

from __future__ import annotations

import contextlib

import optuna
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.tuning.failure_detector import FailureDetector, owner


def counts(trial: FrozenTrial) -> bool:
    """Return whether a trial counts towards the number of trials of its study."""
    if trial.state == TrialState.WAITING or trial.user_attrs.get("surplus"):
        return False
    return trial.state != TrialState.FAIL or "error" in trial.user_attrs


def has_room(study: optuna.Study, wanted: int) -> bool:
    """Return whether another trial is to be begun."""
    return sum(counts(trial) for trial in study.get_trials(deepcopy=False)) < wanted


def begin_trial(study: optuna.Study, wanted: int) -> optuna.Trial | None:
    """Begin a trial and return it, or None if there are enough.

    The storage numbers trials in turn: who finds enough with lower numbers gives its own back.
    """
    if not has_room(study, wanted):
        return None
    trial = study.ask()
    before = [t for t in study.get_trials(deepcopy=False) if t.number < trial.number]
    if sum(map(counts, before)) >= wanted:
        trial.set_user_attr("surplus", True)
        study.tell(trial, state=TrialState.FAIL)
        return None
    try:
        for name, value in owner().items():
            trial.set_user_attr(name, value)
    except BaseException:  # Ctrl-C: without an owner it would count as running for a whole LEASE
        study.tell(trial, state=TrialState.FAIL)
        raise
    return trial


def fail_lost_trials(study: optuna.Study, detector: FailureDetector) -> list[int]:
    """Mark trials whose process is dead as failed, and return their numbers."""
    lost = []
    for trial in running(study):
        if detector.is_dead((study.study_name, trial.number), trial.user_attrs):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
                lost.append(trial.number)
    return lost


def running(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that any process is running."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
