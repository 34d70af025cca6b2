"""Run the best trial of each study over several seeds, and compute the test metric.

A second set of runs shows what a user gets who tunes only the compressor. It takes the tuned fields
of compressor and memory, and the other hyper-parameters of the dense baseline's best trial. A third
set trains densely with the method's other hyper-parameters: had the dense baseline's study missed
them, the method would seem better than dense. Runs that would be equal to others are left out.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import optuna

from lightning_gc.methods.method import DENSE, PREFIXES, Method
from lightning_gc.tuning.early_stopping import EarlyStopping, MissingMetric
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.failure_detector import FailureDetector, has_room, heartbeat, owner
from lightning_gc.tuning.studies import best_trial, hyper_parameters
from lightning_gc.tuning.trial import TrialError, train

TUNED, TRANSFERRED, RETURNED = "tuned", "dense_hyper_parameters", "dense_with_its_hyper_parameters"


def run_finals(
    experiment: Experiment,
    method: Method,
    study: optuna.Study,
    dense: optuna.Study,
    detector: FailureDetector,
) -> Iterator[dict[str, Any]]:
    """Do the missing final runs, and yield the record of each.

    Records are stored under the number of the best trial, so a new best trial gets new runs. Two
    processes may do the same run, with the same result: if they begin at the same instant, or if
    one was taken for dead.
    """
    for key, source, params, seed in _planned(experiment, method, study, dense):
        trained = Method(DENSE) if source == RETURNED else method
        known, run = study.user_attrs.get(key), (study.study_name, key)
        if known and ("validation" in known or not detector.is_dead(run, known)):
            continue
        began = time.monotonic()
        with _claimed(study, key):
            record = _run(experiment, trained, params, seed)
        record |= {"source": source, "params": dict(params), "seed": seed}
        record["seconds"] = time.monotonic() - began
        study.set_user_attr(key, record)
        yield record


def finals_running(
    experiment: Experiment, method: Method, study: optuna.Study, dense: optuna.Study
) -> bool:
    """Return whether another process is doing a final run."""
    known = study.user_attrs
    keys = [key for key, *_ in _planned(experiment, method, study, dense)]
    return any(known.get(key) and "validation" not in known[key] for key in keys)


def final_records(study: optuna.Study, dense: optuna.Study | None) -> list[dict[str, Any]]:
    """Return the records of the current best trials."""
    prefixes = [_prefix(TUNED, study)]
    if dense is not None:
        prefixes += [_prefix(source, study, dense) for source in (TRANSFERRED, RETURNED)]
    return [
        record
        for prefix in prefixes
        for key, record in study.user_attrs.items()
        if key.startswith(prefix) and record and "validation" in record
    ]


def finals_total(
    experiment: Experiment, method: Method, study: optuna.Study, dense: optuna.Study
) -> int:
    """Return the number of a method's final runs; before the last trial, as if it will have a best.

    A study in which all trials have failed has none.
    """
    if has_room(study, experiment.trials):
        return len(experiment.seeds) * (1 if method.name == DENSE else 3)
    return len(list(_planned(experiment, method, study, dense)))


def _planned(
    experiment: Experiment, method: Method, study: optuna.Study, dense: optuna.Study
) -> Iterator[tuple[str, str, Mapping[str, Any], int]]:
    """Yield ``(key, source, hyper-parameters, seed)`` of each final run of a method."""
    winner = best_trial(study)
    if winner is None:
        return
    runs = [(_prefix(TUNED, study), TUNED, winner.params)]
    if method.name != DENSE and best_trial(dense) is not None and not shares(study, dense):
        own = {n: v for n, v in winner.params.items() if n.startswith(PREFIXES)}
        for source, params in (
            (TRANSFERRED, hyper_parameters(dense) | own),
            (RETURNED, hyper_parameters(study)),
        ):
            runs.append((_prefix(source, study, dense), source, params))
    for prefix, source, params in runs:
        for seed in experiment.seeds:
            yield f"{prefix}{seed}", source, params, seed


def shares(study: optuna.Study, dense: optuna.Study) -> bool:
    """Return whether two winners differ in nothing but a method's own fields."""
    return hyper_parameters(study) == hyper_parameters(dense)


def _prefix(source: str, *studies: optuna.Study) -> str:
    """Return the prefix of the keys of runs with these studies' current best trials."""
    numbers = ["none" if best is None else str(best.number) for best in map(best_trial, studies)]
    return f"final/{source}/{'-'.join(numbers)}/"


@contextlib.contextmanager
def _claimed(study: optuna.Study, key: str) -> Iterator[None]:
    """Reserve a run for this process; release it on failure, unless another one has taken it."""
    worker = owner()
    study.set_user_attr(key, worker)

    def is_ours() -> bool:
        known = study.user_attrs.get(key) or {}
        return all(known.get(name) == worker[name] for name in ("host", "pid", "born"))

    def beat(now: float) -> None:
        if is_ours():
            study.set_user_attr(key, worker | {"beat": now})

    try:
        with heartbeat(beat):
            yield
    except BaseException:
        if is_ours():
            study.set_user_attr(key, None)
        raise


def _run(
    experiment: Experiment, method: Method, params: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    stopping = EarlyStopping(experiment, method)
    trial = optuna.trial.FixedTrial(dict(params))
    try:
        tested = train(stopping, trial, seed)
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
