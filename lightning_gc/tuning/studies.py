"""Open Optuna studies: their rules, sampler and pruner; find the best trial."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import given_fields, path_of
from lightning_gc.methods.method import PREFIXES, Method, as_json
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.failure_detector import counts

RULES = "rules"


def open_study(
    experiment: Experiment,
    method: Method,
    storage: BaseStorage,
    dense: optuna.Study | None = None,
) -> optuna.Study:
    """Return the study of a method; create it if it is missing.

    Args:
        experiment: the rules.
        method: how gradients are exchanged.
        storage: of the study.
        dense: the baseline's study. Its winner's hyper-parameters are the first trial's, with the
            method's own fields at their defaults.

    Raises:
        ValueError: the study exists with other rules.
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
        sampler=PerTrialSampler(
            experiment.sampler,
            experiment.seed,
            pareto,
            lambda: {} if dense is None else hyper_parameters(dense) | method.untuned(),
        ),
        pruner=NopPruner() if experiment.pruner == "none" else pruner,
        load_if_exists=True,
    )
    known = study.user_attrs.get(RULES)
    if known is not None or study.get_trials(deepcopy=False):
        check_rules(name, known, rules)
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
        candidate: returns values of the first trial that counts, as far as they are in their
            ranges; other values are drawn.
    """

    def __init__(
        self,
        kind: str,
        seed: int,
        pareto: bool,
        candidate: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._kind, self._seed, self._pareto = kind, seed, pareto
        self._sampler, self._candidate = self._make(0), candidate
        self._given: Mapping[str, Any] = {}

    def _make(self, seed: int) -> BaseSampler:
        if self._kind == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, multivariate=not self._pareto, constant_liar=True)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the sampler for this trial; the first one that counts is the candidate."""
        before = (t for t in study.get_trials(deepcopy=False) if t.number < trial.number)
        self._given = {} if any(map(counts, before)) else self._candidate()
        text = f"{self._seed} {study.study_name} {trial.number}".encode()
        digest = hashlib.sha256(text).digest()
        self._sampler = self._make(int.from_bytes(digest[:4], "big"))
        self._sampler.before_trial(study, trial)

    infer_relative_search_space = _of_the_sampler("infer_relative_search_space")
    sample_relative = _of_the_sampler("sample_relative")
    after_trial = _of_the_sampler("after_trial")

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, name: str, distribution: BaseDistribution
    ) -> Any:
        """Return the candidate's value if it is in the range, else a drawn one."""
        drawn = self._sampler.sample_independent(study, trial, name, distribution)
        given = self._given.get(name)
        return given if given is not None and _within(given, distribution) else drawn


def _within(value: Any, distribution: Any) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    return isinstance(value, int | float) and distribution.low <= value <= distribution.high


def hyper_parameters(study: optuna.Study) -> dict[str, Any]:
    """Return the hyper-parameters of the best trial so far, without the method's own."""
    best = best_trial(study)
    found = {} if best is None else best.params
    return {name: value for name, value in found.items() if not name.startswith(PREFIXES)}


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """Return the trial with the best validation metric among those within the budget, if any."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    done = [trial for trial in done if trial.user_attrs.get("over_budget", -1) <= 0]
    if not done:
        return None
    best = min if study.directions[0] == StudyDirection.MINIMIZE else max
    return best(done, key=lambda trial: trial.values[0])


# Arguments of the Trainer that only affect output.
_SHOWN = ("logger", "default_root_dir", "enable_progress_bar", "enable_model_summary")


def rules_of(experiment: Experiment, method: Method) -> dict[str, Any]:
    """Return the rules of a method's trials: the fixed settings, as plain values to compare.

    The number of trials and the timeout are not rules, because finished trials stay valid. Shared
    space, model, data and Trainer arguments are known if ``build`` declares them, as ``YAMLBuild``
    does; a function's code is not compared.
    """
    memory, scheme = method.memory_and_scheme()
    budget, pareto = experiment.budget_of(method), experiment.objective == "pareto"
    build, settings = experiment.build, vars(experiment)
    sections = getattr(build, "sections", {})
    trainer = {**experiment.trainer, **(sections.get("trainer") or {})}
    rules = {
        "metric": experiment.metric,
        "mode": experiment.mode,
        "objective": experiment.objective,
        "compressor": path_of(method.compressor_class),
        "fixed": method.fixed,
        "space": as_json(method.tuned) | as_json(getattr(build, "space", ())),
        "budget": budget,
        "bytes_counted": None if budget is None and not pareto else experiment.bytes_counted,
        "workers": max(experiment.workers, experiment.devices),
        "min_numel": method.min_numel,
        "memory": memory,
        "memory_space": as_json(method.tuned_memory),
        "rounds": method.rounds,
        "rounds_space": as_json(method.rounds_space),
        "scheme": scheme,
        "controller": method.controller,
        "model": sections.get("model"),
        "data": sections.get("data"),
        "trainer": {name: value for name, value in trainer.items() if name not in _SHOWN},
    }
    more = ("test_metric", "sampler", "pruner", "warmup", "patience", "seed", "seeds", "network")
    rules |= {name: settings[name] for name in (*more, "devices")}
    plain: dict[str, Any] = json.loads(json.dumps(_plain(rules)))  # as the storage returns them
    return plain


def check_rules(study: str, known: Any, asked: Mapping[str, Any]) -> None:
    """Raise ValueError unless an existing study has the requested rules.

    Seeds of final runs may be added.

    Args:
        study: its name.
        known: its stored rules.
        asked: the requested rules, as ``rules_of`` returns them.
    """
    known = dict(known) if isinstance(known, dict) else {}
    seeds = known.get("seeds")
    if isinstance(seeds, list) and all(seed in asked["seeds"] for seed in seeds):
        known["seeds"] = asked["seeds"]
    old, new = dict(_leaves(known)), dict(_leaves(asked))
    other = [path for path in old | new if old.get(path) != new.get(path)]
    if other:
        refuse(
            f"The study {study!r} exists with {_said(other, old)}, but is requested with "
            f"{_said(other, new)}, so trials would not compare. Change the settings back, or give "
            "the experiment another name or storage"
        )


def _plain(value: Any) -> Any:
    """Return a value as JSON stores it: for an object its class and its non-default fields.

    An object that is not a dataclass is reduced to its class.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, type):
        return path_of(value)
    return {"class_path": path_of(type(value))} | _plain(given_fields(value))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, value)`` of all values that are not None."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif value is not None:
        yield path, value


def _said(paths: Iterable[str], leaves: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{path}={leaves[path]!r}" if path in leaves else f"no {path}" for path in paths
    )
