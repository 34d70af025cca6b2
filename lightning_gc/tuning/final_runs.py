"""Final runs: the best trial of each study over several seeds, with the test metric.

Each method is also run with its own fields as tuned, but the shared hyper-parameters of the dense
baseline's best trial: what a user gets who does not tune again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import optuna

from lightning_gc.tuning.early_stopping import EarlyStopping, MissingMetric
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import DENSE, Method
from lightning_gc.tuning.parameter_space import compressor_params, shared_params
from lightning_gc.tuning.studies import best_trial
from lightning_gc.tuning.trial import TrialError, train
from lightning_gc.tuning.trial_leases import heartbeat, is_dead, owner

TUNED, TRANSFERRED = "tuned", "dense_hyper_parameters"
_PREFIX = "final"


def run_finals(
    experiment: Experiment,
    method: Method,
    study: optuna.Study,
    dense: optuna.Study | None,
) -> Iterator[dict[str, Any]]:
    """Do the final runs that no process has done, and yield each one's record.

    Records are kept under the number of the best trial: a new best trial has runs of its own.
    """
    for source, params in _candidates(method, study, dense):
        for seed in experiment.seeds:
            key = _key(study, dense, source, seed)
            if _done_or_running(study, key):
                continue
            worker = owner()
            study.set_user_attr(key, worker)
            try:
                with heartbeat(functools.partial(_beat, study, key, worker)):
                    record = _run(experiment, method, params, seed)
            except BaseException:
                study.set_user_attr(key, None)
                raise
            record |= {"source": source, "params": dict(params), "seed": seed}
            study.set_user_attr(key, record)
            yield record


def finals_running(
    experiment: Experiment, method: Method, study: optuna.Study, dense: optuna.Study | None
) -> bool:
    """Return whether another process is at a final run."""
    keys = [
        _key(study, dense, source, seed)
        for source, _ in _candidates(method, study, dense)
        for seed in experiment.seeds
    ]
    known = study.user_attrs
    return any(key in known and known[key] and "validation" not in known[key] for key in keys)


def final_records(study: optuna.Study, dense: optuna.Study | None) -> list[dict[str, Any]]:
    """Return the records of the current best trials."""
    found = []
    for source in (TUNED, TRANSFERRED):
        if source == TRANSFERRED and dense is None:
            continue
        prefix = _key(study, dense, source, None)
        for key, record in study.user_attrs.items():
            if key.startswith(prefix) and record and "validation" in record:
                found.append(record)
    return found


def _candidates(
    method: Method, study: optuna.Study, dense: optuna.Study | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    winner = best_trial(study)
    if winner is None:
        return
    yield TUNED, winner.params
    baseline = best_trial(dense) if dense is not None and method.name != DENSE else None
    if baseline is not None:
        yield TRANSFERRED, shared_params(baseline.params) | compressor_params(winner.params)


def _key(study: optuna.Study, dense: optuna.Study | None, source: str, seed: int | None) -> str:
    winner = best_trial(study)
    numbers = "none" if winner is None else str(winner.number)
    if source == TRANSFERRED and dense is not None:
        baseline = best_trial(dense)
        numbers += "-none" if baseline is None else f"-{baseline.number}"
    return f"{_PREFIX}/{source}/{numbers}/" + ("" if seed is None else str(seed))


def _beat(study: optuna.Study, key: str, worker: dict[str, Any], now: float) -> None:
    study.set_user_attr(key, worker | {"beat": now})


def _done_or_running(study: optuna.Study, key: str) -> bool:
    """Return whether a run is done, or running in another process.

    Two processes that ask at the same instant both run it, with the same result.
    """
    known = study.user_attrs.get(key)
    if not known:
        return False
    return "validation" in known or not is_dead(known)


def _run(
    experiment: Experiment, method: Method, params: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    stopping = EarlyStopping(experiment, method)
    trial = optuna.trial.FixedTrial(dict(params))
    try:
        tested = train(experiment, method, trial, stopping, seed, final=True)
    except MissingMetric:
        raise
    except Exception as error:
        raise TrialError(
            f"The final run of {method.name} with seed {seed} failed. {type(error).__name__}: "
            f"{error} Its parameters were {dict(params)}."
        ) from error
    diverged = stopping.outcome == "diverged"
    return {
        **stopping.record(),
        "validation": None if diverged else stopping.best,
        "test": None if diverged or tested is None or not math.isfinite(tested) else tested,
        "diverged": diverged,
    }
