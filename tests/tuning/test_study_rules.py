"""A study's identity is all that its trials depend on; another one is refused in a sentence."""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.storages import BaseStorage

from lightning_gc import AllGather, ErrorFeedback, LocalMomentum, NetworkModel, NoMemory, TwoShot
from lightning_gc.compressors import Range
from lightning_gc.controllers import Accordion, Fixed
from lightning_gc.tuning import Experiment, Method, RoundPlan, open_storage
from lightning_gc.tuning.experiment import load_experiment
from lightning_gc.tuning.studies import RULES, open_study, rules_of
from tests.support.tuning import QUIET, experiment


@pytest.fixture
def storage(tmp_path: Path) -> BaseStorage:
    return open_storage(tmp_path / "toy.journal")


def topk(**changes: Any) -> Method:
    return Method("topk", **changes)


def signs(**changes: Any) -> Method:
    return Method("sign_sgd", **{"memory": "local_momentum"} | changes)


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"mode": "max"}, "mode='min'", "mode='max'"),
        ({"test_metric": None}, "test_metric='test'", "no test_metric"),
        ({"sampler": "tpe"}, "sampler='random'", "sampler='tpe'"),
        ({"budget": 1e6}, "no budget", "budget=1000000.0"),
        ({"pruner": "none"}, "pruner='median'", "pruner='none'"),
        ({"warmup": 1}, "warmup=3", "warmup=1"),
        ({"patience": 4}, "no patience", "patience=4"),
        ({"seed": 1}, "seed=0", "seed=1"),
        ({"seeds": (1,)}, "seeds=[0]", "seeds=[1]"),
        ({"workers": 4}, "workers=2", "workers=4"),
        ({"workers": 1, "devices": 2}, "devices=1", "devices=2"),
        (
            {"network": NetworkModel(1.0)},
            "no network.bandwidth_gbps",
            "network.bandwidth_gbps=1.0",
        ),
        ({"trainer": {**QUIET, "max_epochs": 3}}, "trainer.max_epochs=2", "trainer.max_epochs=3"),
        (
            {"trainer": {**QUIET, "precision": "bf16-mixed"}},
            "no trainer.precision",
            "trainer.precision='bf16-mixed'",
        ),
    ],
)
def test_another_experiment_is_refused(
    storage: BaseStorage, changes: dict[str, Any], old: str, new: str
) -> None:
    open_study(experiment(), topk(), storage)
    open_study(experiment(), topk(), storage)
    refused(storage, experiment(**changes), topk(), old, new)


@pytest.mark.parametrize(
    ("method", "other", "old", "new"),
    [
        (topk(), topk(min_numel=0), "min_numel=1024", "min_numel=0"),
        (topk(), topk(fixed={"density": 0.1}), "space.density=", "fixed.density=0.1"),
        (topk(), topk(memory=ErrorFeedback(0.9)), "no memory.decay", "memory.decay=0.9"),
        (
            topk(),
            topk(memory=NoMemory()),
            "lightning_gc.memories.ErrorFeedback",
            "memories.NoMemory",
        ),
        (topk(), topk(scheme=TwoShot()), "lightning_gc.schemes.AllGather", "schemes.TwoShot"),
        (
            topk(),
            topk(controller=Fixed(0.1)),
            "no controller.class_path",
            "controller.class_path='lightning_gc.controllers.Fixed'",
        ),
        (
            topk(controller=Accordion(0.1, 0.01)),
            topk(controller=Accordion(0.1, 0.01, interval=5)),
            "no controller.interval",
            "controller.interval=5",
        ),
        (
            signs(),
            signs(memory_space=(Range("momentum", 0.1, 0.2),)),
            "memory_space.momentum=[0.5, 0.99",
            "memory_space.momentum=[0.1, 0.2",
        ),
        (signs(), signs(memory=LocalMomentum()), "memory_space.momentum", "no memory_space"),
        (topk(rounds=RoundPlan(8)), topk(rounds=RoundPlan(4)), "rounds.every=8", "rounds.every=4"),
    ],
)
def test_another_method_of_the_same_name_is_refused(
    storage: BaseStorage, method: Method, other: Method, old: str, new: str
) -> None:
    open_study(experiment(), method, storage)
    open_study(experiment(), method, storage)
    refused(storage, experiment(), other, old, new)


def refused(storage: BaseStorage, rules: Any, method: Method, old: str, new: str) -> None:
    with pytest.raises(ValueError, match="exists with") as caught:
        open_study(rules, method, storage)
    exists, _, asked = str(caught.value).partition(", but is requested with ")
    assert exists.startswith(f"The study 'toy/{method.name}' exists with ")
    assert old in exists
    assert new in asked
    assert asked.endswith(
        ", so trials would not compare. Change the settings back, or give the experiment another "
        "name or storage."
    )


def test_no_setting_is_forgotten() -> None:
    known = set(rules_of(experiment(), topk()))
    settings = {field.name for cls in (Experiment, Method) for field in dataclasses.fields(cls)}
    # The name is the study's; how many trials are made and what is given up leave those made alone.
    assert settings - known == {"name", "build", "trials", "timeout"}


def test_what_the_defaults_are_may_be_said(storage: BaseStorage) -> None:
    open_study(experiment(), topk(), storage)
    said = topk(memory="error_feedback", scheme=AllGather())
    open_study(experiment(network=NetworkModel()), said, storage)


def test_more_seeds_and_trials_go_on(storage: BaseStorage) -> None:
    open_study(experiment(), topk(), storage)
    study = open_study(experiment(seeds=(0, 1), trials=9), topk(), storage)
    assert study.user_attrs[RULES]["seeds"] == [0, 1]
    refused(storage, experiment(), topk(), "seeds=[0, 1]", "seeds=[0]")


FILE = """
model: {class_path: tests.support.tuning.Bowl, init_args: {x: 0.5}}
data: {class_path: tests.support.tuning.Data}
trainer: {accelerator: cpu, max_epochs: 1}
tune:
  name: toy
  metric: loss
  space: {model.x: {low: 0, high: 1}}
  methods:
    topk: {memory: {class_path: lightning_gc.ErrorFeedback, init_args: {decay: 0.9}}}
"""


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        ("model.init_args.slope", 1.0, "no model.init_args.slope", "model.init_args.slope=1.0"),
        ("trainer.max_epochs", 2, "trainer.max_epochs=1", "trainer.max_epochs=2"),
        ("tune.space", {"model.x": [0.5]}, "model.x=[0.0, 1.0, 'linear']", "model.x=[0.5]"),
        ("tune.methods.topk.memory.init_args.decay", 0.8, "decay=0.9", "decay=0.8"),
    ],
)
def test_another_file_under_the_same_name_is_refused(
    storage: BaseStorage, path: str, value: Any, old: str, new: str
) -> None:
    sections = yaml.safe_load(FILE)
    rules, (method,) = load_experiment(sections)
    open_study(rules, method, storage)
    shown = copy.deepcopy(sections)
    shown["trainer"]["enable_progress_bar"] = True
    open_study(load_experiment(shown)[0], topk(memory=ErrorFeedback(0.9)), storage)
    changed = copy.deepcopy(sections)
    *outer, last = path.split(".")
    node = changed
    for name in outer:
        node = node[name]
    node[last] = value
    rules, (method,) = load_experiment(changed)
    refused(storage, rules, method, old, new)


def test_a_study_that_has_not_stored_a_rule_is_refused(storage: BaseStorage) -> None:
    study = open_study(experiment(), topk(), storage)
    rules = study.user_attrs[RULES]
    del rules["min_numel"]
    study.set_user_attr(RULES, rules)
    refused(storage, experiment(), topk(), "no min_numel", "min_numel=1024")


@pytest.mark.parametrize("stored", [None, 5, {}, {"metric": "loss"}])
def test_a_study_of_somebody_else_is_refused(storage: BaseStorage, stored: Any) -> None:
    study = open_study(experiment(), topk(), storage)
    study.tell(study.ask(), 1.0)
    study.set_user_attr(RULES, stored)
    with pytest.raises(ValueError, match=re.escape("no compressor, ")):
        open_study(experiment(), topk(), storage)
