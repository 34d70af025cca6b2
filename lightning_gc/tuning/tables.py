"""Tables of the report, read from the studies alone."""

from __future__ import annotations

import csv
import io
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.tuning.final_runs import TRANSFERRED, TUNED, final_records
from lightning_gc.tuning.method import DENSE
from lightning_gc.tuning.studies import RULES, best_trial
from lightning_gc.tuning.trial_leases import counts

TOP = 8
"""Greatest number of best trials of a study in box plots; at most a third of its trials."""

_RESULTS = """method validation test test_spread seeds test_with_dense_hyper_parameters
test_with_dense_hyper_parameters_spread ratio wire_bytes epochs complete pruned failed"""

Row = dict[str, Any]
Studies = Mapping[str, optuna.Study]


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        columns: their names, in order.
        rows: ``{column: value}``; missing values are left empty.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def to_csv(self) -> str:
        """Return the table as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def tables(studies: Studies) -> dict[str, Table]:
    """Return all tables of an experiment's studies, by name."""
    # The dense baseline first.
    ordered = dict(sorted(studies.items(), key=lambda item: item[0] != DENSE))
    contents: dict[str, tuple[Callable[[Studies], Iterable[Row]], str]] = {
        "results": (_results, _RESULTS),
        "winners": (_winners, "method parameter value dense_value"),
        "metric_against_ratio": (_scatter, "method trial metric ratio wire_bytes on_front"),
        "tuned_parameters": (_parameters, "method parameter trial value"),
        "seconds_per_step": (_seconds, "method computation compression communication estimated"),
        "convergence": (_convergence, "method epoch metric"),
        "epochs_to_converge": (_epochs, "method trial best_epoch epochs"),
        "importance": (_importance, "method parameter importance"),
    }
    return {
        name: Table(tuple(columns.split()), tuple(rows(ordered)))
        for name, (rows, columns) in contents.items()
    }


def metric_name(studies: Studies) -> str:
    """Return the name of the metric that trials were selected on."""
    rules = next(iter(studies.values())).user_attrs.get(RULES, {})
    return str(rules.get("metric", "metric"))


def log_scaled(studies: Studies, parameter: str) -> bool:
    """Return whether a parameter was drawn on a logarithmic scale."""
    trials = (trial for study in studies.values() for trial in study.get_trials(deepcopy=False))
    return any(getattr(t.distributions.get(parameter), "log", False) for t in trials)


def _loss(study: optuna.Study, trial: FrozenTrial) -> float:
    """Return the metric with the sign by which less is better."""
    value: float = trial.values[0]
    return value if study.directions[0] == StudyDirection.MINIMIZE else -value


def _complete(study: optuna.Study) -> list[FrozenTrial]:
    """Return the complete trials, best first."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(done, key=lambda trial: _loss(study, trial))


def _top(studies: Studies) -> Iterator[tuple[str, FrozenTrial]]:
    """Yield ``(method, trial)`` of the best trials of each study."""
    for name, study in studies.items():
        done = _complete(study)
        for trial in done[: min(TOP, max(3, len(done) // 3))]:
            yield name, trial


def _best(studies: Studies) -> dict[str, FrozenTrial]:
    """Return ``{method: best trial}`` of the studies that have one."""
    found = {name: best_trial(study) for name, study in studies.items()}
    return {name: best for name, best in found.items() if best is not None}


def _results(studies: Studies) -> Iterator[Row]:
    dense, winners = studies.get(DENSE), _best(studies)
    for name, study in studies.items():
        finals = final_records(study, dense)
        tuned = [record for record in finals if record["source"] == TUNED]
        moved = [record for record in finals if record["source"] == TRANSFERRED]
        best, states = winners.get(name), [t.state for t in study.get_trials() if counts(t)]
        row: Row = {
            "method": name,
            "validation": None if best is None else best.values[0],
            "seeds": len(tuned),
            "complete": states.count(TrialState.COMPLETE),
            "pruned": states.count(TrialState.PRUNED),
            "failed": states.count(TrialState.FAIL),
        }
        if best is not None:
            row |= {key: best.user_attrs.get(key) for key in ("ratio", "wire_bytes", "epochs")}
        row["test"], row["test_spread"] = _mean(tuned)
        key = "test_with_dense_hyper_parameters"
        row[key], row[f"{key}_spread"] = _mean(moved if name != DENSE else tuned)
        yield row


def _mean(records: list[Row]) -> tuple[Any, float | None]:
    """Return mean and standard deviation over seeds, or "diverged" if a run has."""
    if any(record["diverged"] for record in records):
        return "diverged", None
    # Without a test metric the final runs' validation takes its place.
    values = [r["test"] if r["test"] is not None else r["validation"] for r in records]
    if not values:
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _winners(studies: Studies) -> Iterator[Row]:
    winners = _best(studies)
    dense = winners[DENSE].params if DENSE in winners else {}
    for name, best in winners.items():
        for parameter, value in best.params.items():
            row = {"parameter": parameter, "value": value, "dense_value": dense.get(parameter)}
            yield {"method": name, **row}


def _scatter(studies: Studies) -> list[Row]:
    found = []
    for name, study in studies.items():
        for trial in _complete(study):
            row = {
                "method": name,
                "trial": trial.number,
                "metric": trial.values[0],
                "ratio": trial.user_attrs.get("ratio", 1.0),
                "wire_bytes": trial.user_attrs.get("wire_bytes", 0.0),
            }
            found.append((-row["ratio"], _loss(study, trial), row))
    # From the highest ratio down, a point is on the front if none before it was as good.
    best = float("inf")
    for _, loss, row in sorted(found, key=lambda each: each[:2]):
        row["on_front"] = loss < best
        best = min(best, loss)
    return [row for *_, row in found]


def _parameters(studies: Studies) -> Iterator[Row]:
    for name, trial in _top(studies):
        for parameter, value in trial.params.items():
            row = {"parameter": parameter, "trial": trial.number, "value": value}
            yield {"method": name, **row}


def _seconds(studies: Studies) -> Iterator[Row]:
    for name, best in _best(studies).items():
        spent = best.user_attrs.get("per_step", {})
        if not spent:
            continue
        estimated = "communication_seconds_estimated" in spent
        sent = "communication_seconds_estimated" if estimated else "communicate_seconds"
        yield {
            "method": name,
            "computation": spent.get("compute_seconds", 0.0),
            "compression": spent.get("compress_seconds", 0.0) + spent.get("decode_seconds", 0.0),
            "communication": spent.get(sent, 0.0),
            "estimated": estimated,
        }


def _convergence(studies: Studies) -> Iterator[Row]:
    for name, best in _best(studies).items():
        for epoch, value in enumerate(best.user_attrs.get("curve", []), start=1):
            yield {"method": name, "epoch": epoch, "metric": value}


def _epochs(studies: Studies) -> Iterator[Row]:
    for name, trial in _top(studies):
        known = trial.user_attrs
        if "best_epoch" in known:
            row = {"best_epoch": known["best_epoch"] + 1, "epochs": known["epochs"]}
            yield {"method": name, "trial": trial.number, **row}


def _importance(studies: Studies) -> Iterator[Row]:
    for name, study in studies.items():
        done = _complete(study)
        # Fewer say nothing, and one value everywhere leaves nothing to explain.
        if len(done) < 4 or len({trial.values[0] for trial in done}) < 2:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            found = optuna.importance.get_param_importances(
                study,
                evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                target=(lambda t: float(t.values[0])) if len(study.directions) > 1 else None,
            )
        for parameter, importance in found.items():
            yield {"method": name, "parameter": parameter, "importance": importance}
