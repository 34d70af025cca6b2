"""Stop a trial early, after a validation: divergence, byte budget, pruner, patience."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import optuna

from lightning_gc.methods.method import Method
from lightning_gc.tuning.experiment import Experiment

TOTAL, PER_STEP = "compression/total_", "compression_epoch/"
TIMES = ("seconds", "cpu_seconds")
Outcome = Literal["complete", "pruned", "diverged"]


class MissingMetric(ValueError):
    """A metric has not been logged."""


def look_up(metric: str, logged: Mapping[str, Any], kind: str, hook: str) -> float:
    """Return the value of a metric that the module must log in ``hook``.

    Raises:
        MissingMetric: the metric was not logged.
    """
    if metric in logged:
        return float(logged[metric])
    names = sorted(n for n in logged if not n.startswith("compression") and n not in TIMES)
    raise MissingMetric(
        f"The {kind} {metric!r} was not logged. Logged were {', '.join(names) or 'none'}: call "
        f"self.log in {hook}, or name one of these."
    )


class BestTracker:
    """Tracks the best value of the metric and the epochs since then.

    Epochs without a validation do not count.

    Args:
        experiment: has the metric and its direction.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: its epoch, from 0.
        epochs_since: consecutive epochs without an improvement.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.best: float | None = None
        self.best_epoch = -1
        self.epochs_since = 0

    def add(self, value: float) -> int:
        """Add the next epoch's value; return ``epochs_since``, 0 for an improvement."""
        epoch = self.best_epoch + self.epochs_since + 1
        if self.best is None or self.experiment.better(value, self.best):
            self.best, self.best_epoch = value, epoch
        self.epochs_since = epoch - self.best_epoch
        return self.epochs_since


class EarlyStopping:
    """Decides after each validation whether a run continues, and records its results.

    Args:
        experiment: the rules.
        method: the method of the run.
        trial: receives values and decides on pruning. None for a final run, which only
            divergence and patience stop early.

    Attributes:
        outcome: how the run has ended.
        reason: why the run ended early, in a sentence; else empty.
        curve: the metric of every validation.
        seconds: of training, for every epoch in ``curve``.
        cpu_seconds: CPU time of a worker, for the same epochs.
        logged: of a final run, all metrics that the model has logged, for the same epochs; None
            where a value is missing or not finite.
    """

    def __init__(
        self, experiment: Experiment, method: Method, trial: optuna.Trial | None = None
    ) -> None:
        self.experiment, self.method, self.trial = experiment, method, trial
        self.budget = experiment.budget_of(method) if trial is not None else None
        self.tracker = BestTracker(experiment)
        self.curve: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.logged: dict[str, list[float | None]] = {}
        self.outcome: Outcome = "complete"
        self.reason = ""
        self._logged: dict[str, float] = {}

    def update(self, logged: Mapping[str, float]) -> bool:
        """Return whether the run continues, given the values logged so far.

        Without an epoch's ``seconds``, ``logged`` holds the totals of a finished run without
        validation in its last epochs. Then only the budget is checked.

        Raises:
            MissingMetric: the metric was not logged.
        """
        if "seconds" not in logged:
            self._logged |= logged
            return self.outcome == "complete" and self._within_budget()
        experiment = self.experiment
        value = look_up(experiment.metric, logged, "metric", "validation_step")
        self.curve.append(value)
        self.seconds.append(logged["seconds"])
        self.cpu_seconds.append(logged["cpu_seconds"])
        self._logged = dict(logged)
        if self.trial is None:
            self._keep(logged)
        if not math.isfinite(value):
            return self._stop("diverged", f"{experiment.metric} is {value}")
        epochs_since = self.tracker.add(value)
        if self.trial is not None and experiment.objective == "metric":
            self.trial.report(value, len(self.curve) - 1)
            if not self._within_budget():
                return False
            if self.trial.should_prune():
                return self._stop("pruned", "worse than the median of the trials before")
        if experiment.patience is not None and epochs_since >= experiment.patience:
            return self._stop("complete", f"no improvement for {epochs_since} epochs")
        return True

    def _keep(self, logged: Mapping[str, float]) -> None:
        for name in {**self.logged, **logged}:
            if not name.startswith("compression") and name not in TIMES:
                values = self.logged.setdefault(name, [None] * (len(self.curve) - 1))
                values.append(logged[name] if math.isfinite(logged.get(name, math.nan)) else None)

    @property
    def best(self) -> float:
        """The best value of the metric."""
        assert self.tracker.best is not None
        return self.tracker.best

    @property
    def over_budget(self) -> float:
        """Excess of the bytes over the budget, relative to it; above 0 is too much."""
        return -1.0 if self.budget is None else self.bytes_so_far / self.budget - 1

    @property
    def bytes_so_far(self) -> float:
        """Bytes that count towards the budget."""
        return self._logged.get(TOTAL + self.experiment.bytes_counted, 0.0)

    def record(self) -> dict[str, Any]:
        """Return the run as plain values, for the trial's user attributes."""
        logged = self._logged
        counts = ("wire_bytes", "dense_bytes", "encoded_bytes")
        wire, dense, encoded = (logged.get(TOTAL + name, 0.0) for name in counts)
        parts = {n.removeprefix(PER_STEP): v for n, v in logged.items() if n.startswith(PER_STEP)}
        return {
            "curve": self.curve,
            **({"logged": self.logged} if self.logged else {}),
            "best_epoch": self.tracker.best_epoch,
            "epochs": len(self.curve),
            "reason": self.reason,
            "wire_bytes": wire,
            "dense_bytes": dense,
            "ratio": dense / wire if wire else None,
            "encoded_bytes": encoded,
            "encoding_ratio": logged.get(TOTAL + "encoding_ratio") if encoded else None,
            "epoch_seconds": self.seconds,
            "epoch_cpu_seconds": self.cpu_seconds,
            "per_step": parts,
        }

    def _within_budget(self) -> bool:
        """Return whether the bytes so far are within the budget; end the run if they are not."""
        if self.over_budget <= 0 or self.experiment.objective == "pareto":
            return True
        what = "encoded" if self.experiment.bytes_counted == "encoded_bytes" else "sent"
        count, allowed = self.bytes_so_far, self.budget
        return self._stop("pruned", f"{count:,.0f} bytes {what}, the budget is {allowed:,.0f}")

    def _stop(self, outcome: Outcome, reason: str) -> bool:
        self.outcome, self.reason = outcome, reason
        return False
