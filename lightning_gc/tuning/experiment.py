"""Define an experiment: task, metric, budget, sampler and pruner, equal for all methods."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna

from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import Settings
from lightning_gc.methods import yaml_config
from lightning_gc.methods.method import DENSE, Method, check_budget, parse_all
from lightning_gc.transports.network_model import NetworkModel

Build = Callable[[optuna.trial.BaseTrial], Sequence[Any]]
"""``(trial) -> (model, datamodule)``, or ``(model, datamodule, {Trainer argument: value})``.

An object with attributes ``space`` and ``sections`` declares its search space and its settings, as
``YAMLBuild`` does. A study that was made with other ones is then refused.
"""

RESERVED = ("strategy", "devices", "num_nodes", "enable_checkpointing")


@dataclass(frozen=True)
class Experiment(Settings):
    """A comparison of methods, each tuned with the same number of trials on the same task.

    Args:
        name: prefix of its studies, which are called ``name/method``.
        build: asks the trial for hyper-parameters (``trial.suggest_float("learning_rate", 1, 50)``)
            and returns a new model and datamodule. It must be importable if ``devices`` > 1. Its
            code is not compared; after a change give the experiment another name.
        metric: logged in validation; trials are selected on it.
        mode: ``"min"`` if lower values of the metric are better, else ``"max"``.
        test_metric: logged by ``trainer.test``; computed for the winner only. None: no test.
        trials: per study, pruned and diverged ones included.
        sampler: ``"tpe"`` learns from earlier trials, ``"random"`` does not.
        objective: ``"metric"``: the best metric, within the budget if there is one. ``"pareto"``:
            metric against the same bytes; no trial is pruned then.
        budget: bytes that one worker may send in a run; with a single worker, which sends none,
            those that its gradients may take encoded. The dense baseline has no budget.
        pruner: ``"median"`` stops a trial that is worse than the median of the others at that
            epoch, ``"none"`` stops none.
        warmup: epochs before a trial may be pruned; as for ``patience``, those with a validation.
        patience: consecutive epochs without an improvement after which a run stops. Those without a
            validation, by the Trainer's ``check_val_every_n_epoch``, do not count. None: never.
        seed: of the draws, and of weights and data order in all trials.
        seeds: of the final runs, with the best hyper-parameters. More may be added later.
        workers: simulated workers of a trial that runs on one device, in this process.
        network: estimates their seconds of communication.
        devices: above 1, every trial runs in this number of processes.
        timeout: seconds without a validation after which these processes are killed.
        trainer: arguments of the Trainer, besides strategy and devices: ``max_epochs``, ...

    Raises:
        ValueError: an invalid setting, or two that contradict each other.
    """

    name: str
    build: Build
    metric: str
    mode: Literal["min", "max"] = "min"
    test_metric: str | None = None
    trials: int = 60
    sampler: Literal["tpe", "random"] = "tpe"
    objective: Literal["metric", "pareto"] = "metric"
    budget: float | None = None
    pruner: Literal["median", "none"] = "median"
    warmup: int = 3
    patience: int | None = None
    seed: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    workers: int = 1
    network: NetworkModel = NetworkModel()  # noqa: RUF009 - frozen
    devices: int = 1
    timeout: float = 3600.0
    trainer: Mapping[str, Any] = field(default_factory=dict)
    limits = {
        "trials": "[1, inf)",
        "workers": "[1, inf)",
        "devices": "[1, inf)",
        "patience": "[1, inf) the number of epochs; 5, or None",
        "warmup": "[0, inf) the number of epochs",
        "timeout": "(0, inf] the seconds",
    }

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            refuse("Experiment", "use letters and digits", name=self.name)
        if not self.seeds:
            refuse("seeds=(): give one or more, such as (0, 1, 2)")
        check_budget(self.budget)
        groups = hasattr(os, "killpg")
        judge("Experiment", of=self, has_groups=groups, platform=sys.platform)
        self.check_trainer(self.trainer)

    def check_trainer(self, trainer: Mapping[str, Any]) -> None:
        """Refuse arguments of the Trainer that tuning sets itself, or that clash with workers."""
        for name in RESERVED:
            if trainer.get(name) is not None:
                refuse(
                    f"trainer.{name}={trainer[name]!r}: tuning sets it from the experiment's "
                    "workers and devices. Remove it"
                )
        batches = trainer.get("accumulate_grad_batches") or 1
        every = self.workers * batches
        judge("Trainer of an experiment", of=self, batches=batches, all_batches=every)

    def budget_of(self, method: Method) -> float | None:
        """Return the bytes that a worker may send in a run, or None without a limit."""
        if method.budget is not None:
            return method.budget
        return None if method.name == DENSE else self.budget

    @property
    def bytes_counted(self) -> str:
        """The counted bytes: ``"wire_bytes"``, or one worker's ``encoded_bytes``.

        See ``CompressionMonitor``.
        """
        return "encoded_bytes" if self.workers == self.devices == 1 else "wire_bytes"

    def study_name(self, method: Method) -> str:
        """Return the name of a method's study."""
        return f"{self.name}/{method.name}"

    def better(self, value: float, than: float) -> bool:
        """Return whether one value of the metric is better than another."""
        return value < than if self.mode == "min" else value > than


def load_experiment(
    given: str | Path | Mapping[str, Any], **changes: Any
) -> tuple[Experiment, list[Method]]:
    """Return the experiment and the methods that a file describes.

    Args:
        given: path of the YAML file, or its sections.
        changes: settings in place of those in its section ``tune``, such as ``trials=10``; or None.

    Raises:
        ValueError: the file is missing, is not YAML, or holds invalid settings.
    """
    sections = given if isinstance(given, Mapping) else yaml_config.read(given)
    settings = _settings(sections, changes)
    trainer = yaml_config.mapping("trainer", sections.get("trainer"), "max_epochs: 8")
    devices = trainer.pop("devices", 1)
    if not isinstance(devices, int):
        refuse(f"trainer.devices={devices!r}: tuning needs a number")
    parts = {name: sections.get(name) for name in ("model", "data")} | {"trainer": trainer}
    build = yaml_config.YAMLBuild(parts, parse_all(settings.pop("space")))
    build.check()
    methods = list(yaml_config.methods_in(sections).values())
    experiment = Experiment(**settings, build=build, devices=devices)
    experiment.check_trainer(trainer)
    return experiment, methods


def _settings(sections: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``tune``: fields of ``Experiment``, and ``space``."""
    given = yaml_config.mapping("tune", sections["tune"], "metric: loss")
    given.pop("methods", None)
    given |= {name: value for name, value in changes.items() if value is not None}
    parser = yaml_config.arguments()
    elsewhere = {"build", "devices", "trainer"}  # made of other sections
    parser.add_class_arguments(Experiment, "tune", skip=elsewhere, instantiate=False)
    parser.add_argument("--tune.space", type=dict[str, Any], required=True)
    return dict(vars(parser.instantiate(yaml_config.parse(parser, {"tune": given})).tune))
