"""Trials end when the rules say so, and impossible experiment settings are refused."""

import re
from typing import Any

import pytest

from lightning_gc.tuning import Experiment, Method, MissingMetric
from lightning_gc.tuning.early_stopping import BestTracker, EarlyStopping
from tests.support.tuning import bowl, experiment

nan = float("nan")
SENT = "compression/total_wire_bytes"
TIMES = {"seconds": 0.0, "cpu_seconds": 0.0}


def hear(stopping: EarlyStopping, *values: float, sent: float = 1.0) -> list[bool]:
    """Tell one value per epoch, until the stopping ends the run."""
    said = []
    for epoch, value in enumerate(values, start=1):
        said.append(stopping.update({"loss": value, **TIMES, SENT: sent * epoch}))
        if not said[-1]:
            break
    return said


def test_a_streak_is_counted_and_an_improvement_begins_it_anew() -> None:
    tracker = BestTracker(experiment())
    assert [tracker.add(v) for v in (5, 6, 6, 4, 4, 4, 3)] == [0, 1, 2, 0, 1, 2, 0]
    assert (tracker.best, tracker.best_epoch) == (3, 6)


def test_more_may_be_better() -> None:
    tracker = BestTracker(experiment(mode="max"))
    assert [tracker.add(v) for v in (1, 2, 2, 3)] == [0, 0, 1, 0]


def test_patience_is_a_streak_not_a_sum() -> None:
    stopping = EarlyStopping(experiment(patience=2), Method("topk"))
    assert all(hear(stopping, 5, 6, 4, 5, 3, 4))  # three epochs without improvement, none in a row
    assert hear(stopping, 5, 5) == [False]
    assert stopping.outcome == "complete"
    assert stopping.best == 3
    assert "2 epochs" in stopping.reason


def test_what_is_not_finite_has_diverged() -> None:
    stopping = EarlyStopping(experiment(), Method("topk"))
    assert hear(stopping, 1.0, nan, 0.0) == [True, False]
    assert stopping.outcome == "diverged"
    assert "loss is nan" in stopping.reason


def test_a_metric_that_was_not_logged_is_said_with_those_that_were() -> None:
    stopping = EarlyStopping(experiment(), Method("topk"))
    with pytest.raises(MissingMetric, match=r"'loss' was not logged. Logged were los:"):
        stopping.update({"los": 1.0, **TIMES, SENT: 0.0})


def test_the_dense_baseline_has_no_budget_and_methods_may_have_their_own() -> None:
    rules = experiment(budget=100.0)
    assert rules.budget_of(Method("dense")) is None
    assert rules.budget_of(Method("topk")) == 100
    assert rules.budget_of(Method("topk", budget=5.0)) == 5


@pytest.mark.parametrize(
    ("changes", "value", "fix"),
    [
        ({"mode": "least"}, "'least'", "'min' or 'max'"),
        ({"sampler": "grid"}, "'grid'", "'tpe'"),
        ({"objective": "both"}, "'both'", "'pareto'"),
        ({"pruner": "hyper"}, "'hyper'", "'none'"),
        ({"trials": 0}, "trials=0", "must be 1 or more"),
        ({"workers": 0}, "workers=0", "must be 1 or more"),
        ({"devices": 0}, "devices=0", "must be 1 or more"),
        ({"patience": 0}, "patience=0", "1 or more"),
        ({"trials": 2.5}, "trials=2.5", "a whole number; use 3"),
        ({"workers": 1.5}, "workers=1.5", "a whole number; use 2"),
        ({"patience": 1.5}, "patience=1.5", "a whole number; use 2"),
        ({"patience": nan}, "patience=nan", "a whole number; use 1"),
        ({"patience": "2"}, "patience='2'", "write 2, without quotes"),
        ({"warmup": -1}, "warmup=-1", "0 or more"),
        ({"seeds": ()}, "seeds=()", "give one or more"),
        ({"timeout": 0}, "timeout=0", "seconds must be above 0"),
        ({"timeout": nan}, "timeout=nan", "seconds must be above 0"),
        ({"budget": "1"}, "budget='1'", "write 1, without quotes"),
        ({"budget": -1.0}, "budget=-1.0", "give the bytes"),
        ({"budget": 1.0, "objective": "pareto"}, "budget=1", "Leave the budget out"),
        ({"workers": 2, "devices": 2}, "devices=2", "one of the two"),
        ({"trainer": {"accumulate_grad_batches": 3}}, "accumulate_grad_batches=3", "Use 1"),
        ({"trainer": {"strategy": "ddp"}}, "'ddp'", "Remove it"),
        ({"trainer": {"devices": 2}}, "trainer.devices=2", "Remove it"),
    ],
)
def test_rules_that_cannot_be_are_refused(changes: dict[str, Any], value: str, fix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fix)) as caught:
        experiment(**changes)
    assert value in str(caught.value)


def test_names_that_would_be_lost_in_the_names_of_studies_are_refused() -> None:
    with pytest.raises(ValueError, match="'a/b'"):
        Experiment("a/b", bowl, metric="loss")
