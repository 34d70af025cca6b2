"""Listens to a run, epoch by epoch, and says when it should end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import optuna

from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import Method

WIRE, DENSE_WIRE = "compression/total_wire_bytes", "compression/total_dense_bytes"
PER_STEP = "compression_epoch/"
Verdict = Literal["complete", "pruned", "diverged"]


class MissingMetric(ValueError):
    """The metric to select on has not been logged."""


class Streak:
    """Counts epochs without an improvement, in a row.

    Args:
        experiment: knows what is better.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: when that was, from 0.
        length: epochs since then.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._better = experiment.better
        self.best: float | None = None
        self.best_epoch = -1
        self.length = 0
        self._epochs = 0

    def add(self, value: float) -> int:
        """Take one epoch's value and return how long the streak is now; 0 is an improvement."""
        if self.best is None or self._better(value, self.best):
            self.best, self.best_epoch, self.length = value, self._epochs, 0
        else:
            self.length += 1
        self._epochs += 1
        return self.length


class Judge:
    """Decides after each validation whether the run goes on, and keeps what is worth keeping.

    Args:
        experiment: the rules.
        method: whose run it is.
        trial: reported to, and asked whether to prune; None for a final run, which only stops when
            its patience is at an end.

    Attributes:
        verdict: how the run has ended.
        reason: why, in a sentence; empty where it has come to its end.
        curve: the metric of every validation.
    """

    def __init__(
        self, experiment: Experiment, method: Method, trial: optuna.Trial | None = None
    ) -> None:
        self.experiment = experiment
        self.trial = trial
        self.budget = experiment.budget_of(method) if trial is not None else None
        self.streak = Streak(experiment)
        self.curve: list[float] = []
        self.seconds: list[float] = []
        self.verdict: Verdict = "complete"
        self.reason = ""
        self._figures: dict[str, float] = {}

    def hear(self, figures: Mapping[str, float]) -> bool:
        """Take what has been logged so far and return whether the run goes on.

        Raises:
            MissingMetric: the metric is not among them.
        """
        experiment = self.experiment
        if experiment.metric not in figures:
            logged = sorted(n for n in figures if "/" not in n and n != "seconds")
            raise MissingMetric(
                f"The metric {experiment.metric!r} was not logged. Logged were "
                f"{', '.join(logged) or 'none'}: call self.log in validation_step, or name one of "
                f"these."
            )
        value = figures[experiment.metric]
        self.curve.append(value)
        self.seconds.append(figures["seconds"])
        self._figures = dict(figures)
        if not math.isfinite(value):
            return self._end("diverged", f"{experiment.metric} is {value}")
        streak = self.streak.add(value)
        if self.trial is not None and experiment.objective == "metric":
            self.trial.report(value, len(self.curve) - 1)
            if self.over_budget > 0:
                sent, allowed = figures[WIRE], self.budget
                return self._end("pruned", f"{sent:,.0f} bytes sent, the budget is {allowed:,.0f}")
            if self.trial.should_prune():
                return self._end("pruned", "worse than the median of the trials before")
        if experiment.patience is not None and streak >= experiment.patience:
            self.reason = f"no improvement for {streak} epochs"
            return False
        return True

    @property
    def best(self) -> float:
        """The best value of the metric."""
        assert self.streak.best is not None
        return self.streak.best

    @property
    def over_budget(self) -> float:
        """By how much of the budget it has been exceeded: 0.5 is half as much again."""
        if self.budget is None:
            return -1.0
        return self._figures.get(WIRE, 0.0) / self.budget - 1

    def record(self) -> dict[str, Any]:
        """Return the run as plain values, for the trial's user attributes."""
        figures, wire = self._figures, self._figures.get(WIRE, 0.0)
        dense = figures.get(DENSE_WIRE, 0.0)
        per_step = {n: v for n, v in figures.items() if n.startswith(PER_STEP)}
        return {
            "curve": self.curve,
            "best_epoch": self.streak.best_epoch,
            "epochs": len(self.curve),
            "reason": self.reason,
            "wire_bytes": wire,
            "dense_bytes": dense,
            "ratio": dense / wire if wire else 1.0,
            "epoch_seconds": self.seconds,
            "per_step": {name.removeprefix(PER_STEP): value for name, value in per_step.items()},
        }

    def _end(self, verdict: Verdict, reason: str) -> bool:
        self.verdict, self.reason = verdict, reason
        return False
