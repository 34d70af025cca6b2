"""Optuna studies: rules of a study, sampler and pruner, and the best trial."""

from __future__ import annotations

import hashlib
from typing import Any

import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.study_rules import agreed, rules_of

RULES = "rules"


def open_study(experiment: Experiment, method: Method, storage: BaseStorage) -> optuna.Study:
    """Return the study of a method; a missing one is created.

    Raises:
        ValueError: it exists under other rules.

    Warns:
        UserWarning: it is of a version that did not write all rules down.
    """
    name, pareto = experiment.study_name(method), experiment.objective == "pareto"
    minimize, maximize = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE
    direction = minimize if experiment.mode == "min" else maximize
    rules = rules_of(experiment, method)
    pruner = MedianPruner(n_startup_trials=5, n_warmup_steps=experiment.warmup)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        directions=[direction, minimize] if pareto else [direction],
        sampler=PerTrialSampler(experiment.sampler, experiment.seed, pareto),
        pruner=NopPruner() if experiment.pruner == "none" else pruner,
        load_if_exists=True,
    )
    known = study.user_attrs.get(RULES)
    if known is not None or study.get_trials(deepcopy=False):
        rules = agreed(name, known, rules)
    if known != rules:
        study.set_user_attr(RULES, rules)
    return study


def _of_the_sampler(method: str) -> Any:
    """Return a method that calls the one of ``self._sampler``."""
    return lambda self, *args, **kwargs: getattr(self._sampler, method)(*args, **kwargs)


class PerTrialSampler(BaseSampler):
    """Seeds the sampler for every trial from its number and the study's name.

    Processes that share a study never draw the same values, and a resumed study draws as if it had
    not been interrupted.

    Args:
        kind: ``"random"`` or ``"tpe"``.
        seed: of all draws.
        pareto: whether there are several objectives.
    """

    def __init__(self, kind: str, seed: int, pareto: bool) -> None:
        self._kind, self._seed, self._pareto = kind, seed, pareto
        self._sampler = self._make(0)

    def _make(self, seed: int) -> BaseSampler:
        if self._kind == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, multivariate=not self._pareto, constant_liar=True)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the sampler for this trial."""
        text = f"{self._seed} {study.study_name} {trial.number}".encode()
        digest = hashlib.sha256(text).digest()
        self._sampler = self._make(int.from_bytes(digest[:4], "big"))
        self._sampler.before_trial(study, trial)

    infer_relative_search_space = _of_the_sampler("infer_relative_search_space")
    sample_relative = _of_the_sampler("sample_relative")
    sample_independent = _of_the_sampler("sample_independent")
    after_trial = _of_the_sampler("after_trial")


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """Return the trial with the best validation metric among those within the budget, if any."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    done = [trial for trial in done if trial.user_attrs.get("over_budget", -1) <= 0]
    if not done:
        return None
    best = min if study.directions[0] == StudyDirection.MINIMIZE else max
    return best(done, key=lambda trial: trial.values[0])
