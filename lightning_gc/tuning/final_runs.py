"""Final runs: the winner of each study, over several seeds and with the test metric.

Beside them stand runs of the same method with the shared hyper-parameters of the dense winner, and
the method's own fields as tuned: what a user gets who does not tune anew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import optuna

from lightning_gc.tuning.early_stopping import Judge, MissingMetric
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import DENSE, Method
from lightning_gc.tuning.parameter_space import own, shared
from lightning_gc.tuning.studies import best_trial
from lightning_gc.tuning.trial import TrialError, train
from lightning_gc.tuning.trial_leases import beating, identity, is_gone

TUNED, TRANSFERRED = "tuned", "dense_hyper_parameters"
_PREFIX = "final"


def run_finals(
    experiment: Experiment,
    method: Method,
    study: optuna.Study,
    dense: optuna.Study | None,
) -> Iterator[dict[str, Any]]:
    """Do the final runs that nobody has done, and yield each one's record.

    What is done is kept under the number of the winning trial: another winner is run anew, and the
    test metric of the old one stays where it is.
    """
    for source, params in _candidates(method, study, dense):
        for seed in experiment.seeds:
            key = _key(study, dense, source, seed)
            if _taken(study, key):
                continue
            worker = identity()
            study.set_user_attr(key, worker)
            try:
                with beating(functools.partial(_beat, study, key, worker)):
                    record = _run(experiment, method, params, seed)
            except BaseException:
                study.set_user_attr(key, None)
                raise
            record |= {"source": source, "params": dict(params), "seed": seed}
            study.set_user_attr(key, record)
            yield record


def finals_under_way(
    experiment: Experiment, method: Method, study: optuna.Study, dense: optuna.Study | None
) -> bool:
    """Return whether another process has yet to finish one."""
    keys = [
        _key(study, dense, source, seed)
        for source, _ in _candidates(method, study, dense)
        for seed in experiment.seeds
    ]
    known = study.user_attrs
    return any(key in known and known[key] and "validation" not in known[key] for key in keys)


def final_records(study: optuna.Study, dense: optuna.Study | None) -> list[dict[str, Any]]:
    """Return the final runs of the present winners."""
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
        yield TRANSFERRED, shared(baseline.params) | own(winner.params)


def _key(study: optuna.Study, dense: optuna.Study | None, source: str, seed: int | None) -> str:
    winner = best_trial(study)
    numbers = "none" if winner is None else str(winner.number)
    if source == TRANSFERRED and dense is not None:
        baseline = best_trial(dense)
        numbers += "-none" if baseline is None else f"-{baseline.number}"
    return f"{_PREFIX}/{source}/{numbers}/" + ("" if seed is None else str(seed))


def _beat(study: optuna.Study, key: str, worker: dict[str, Any], now: float) -> None:
    study.set_user_attr(key, worker | {"beat": now})


def _taken(study: optuna.Study, key: str) -> bool:
    """Return whether a run is done, or under way elsewhere.

    Two processes that look at the same instant both run it; they come to the same result.
    """
    known = study.user_attrs.get(key)
    if not known:
        return False
    return "validation" in known or not is_gone(known)


def _run(
    experiment: Experiment, method: Method, params: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    judge = Judge(experiment, method)
    trial = optuna.trial.FixedTrial(dict(params))
    try:
        tested = train(experiment, method, trial, judge, seed, final=True)
    except MissingMetric:
        raise
    except Exception as error:
        raise TrialError(
            f"The final run of {method.name} with seed {seed} failed. {type(error).__name__}: "
            f"{error} Its parameters were {dict(params)}."
        ) from error
    diverged = judge.verdict == "diverged"
    return {
        **judge.record(),
        "validation": None if diverged else judge.best,
        "test": None if diverged or tested is None or not math.isfinite(tested) else tested,
        "diverged": diverged,
    }
