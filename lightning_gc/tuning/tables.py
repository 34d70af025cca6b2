"""Compute the report's tables from the studies alone."""

import csv
import functools
import io
import json
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.methods.method import DENSE
from lightning_gc.tuning.failure_detector import counts
from lightning_gc.tuning.final_runs import RETURNED, TRANSFERRED, TUNED, final_records, shares
from lightning_gc.tuning.studies import RULES, best_trial

TOP = 8
"""Maximum number of best trials per study in plots of their values; at most a third of all."""

_RESULTS = """method validation test test_spread seeds test_with_dense_hyper_parameters
test_with_dense_hyper_parameters_spread dense_with_its_hyper_parameters
dense_with_its_hyper_parameters_spread ratio wire_bytes encoding_ratio encoded_bytes epochs
complete pruned failed"""
_SCATTER = "method trial metric ratio wire_bytes encoding_ratio encoded_bytes on_front"
_SIZES = ("ratio", "wire_bytes", "encoding_ratio", "encoded_bytes")

_FORMULA = re.compile(r"(?![+-]?[\d.]+(e[+-]?\d+)?\Z)[=+\-@\t\r\n]", re.IGNORECASE)
"""Texts that a spreadsheet may evaluate as a formula; plain numbers do not match."""

Row = dict[str, Any]
Cells = Iterator[tuple[Any, ...]]
"""Rows of a table: a value for each column."""
Studies = Mapping[str, optuna.Study]


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Attributes:
        columns: their names, in order.
        rows: ``{column: value}``; missing values are left empty.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def to_csv(self) -> str:
        """Return the table as CSV, without texts that a spreadsheet would evaluate."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({column: _no_formula(value) for column, value in row.items()})
        return text.getvalue()


def _no_formula(value: Any) -> Any:
    """Prefix a text with an apostrophe if a spreadsheet would evaluate it."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def tables(studies: Studies) -> dict[str, ReportTable]:
    """Return all tables of an experiment's studies, by name."""
    # The dense baseline first.
    ordered = dict(sorted(studies.items(), key=lambda item: item[0] != DENSE))
    contents: dict[str, tuple[Callable[[Studies], Cells], str]] = {
        "results": (_results, _RESULTS),
        "final_runs": (_final_runs, "method hyper_parameters seed validation test"),
        "winners": (_winners, "method parameter value dense_value"),
        "metric_against_ratio": (_scatter, _SCATTER),
        "tuned_parameters": (_parameters, "method parameter trial value"),
        "cpu_seconds": (_cpu_seconds, "method trial cpu_seconds"),
        "convergence": (_convergence, "method epoch metric"),
        "epochs_to_converge": (_epochs, "method trial best_epoch epochs"),
        "importance": (_importance, "method parameter importance"),
        "settings": (_settings, "method setting value"),
    }
    found = {}
    for name, (rows, heads) in contents.items():
        columns = tuple(heads.split())
        cells = tuple(dict(zip(columns, row, strict=True)) for row in rows(ordered))
        found[name] = ReportTable(columns, cells)
    return found


def rules_of(studies: Studies) -> dict[str, Any]:
    """Return the rules that all studies share, with defaults for unknown ones."""
    known = next(iter(studies.values())).user_attrs.get(RULES, {})
    return {"metric": "metric", "mode": "min", "workers": 1, **known}


def sizes_of(studies: Studies) -> tuple[str, str]:
    """Return the columns of ratio and bytes: sent bytes, or encoded bytes with one worker."""
    return _SIZES[2:] if rules_of(studies)["workers"] == 1 else _SIZES[:2]


def is_log(studies: Studies, parameter: str) -> bool:
    """Return whether a parameter was drawn on a logarithmic scale."""
    trials = (trial for study in studies.values() for trial in study.get_trials(deepcopy=False))
    return any(getattr(t.distributions.get(parameter), "log", False) for t in trials)


def _loss(study: optuna.Study, trial: FrozenTrial) -> float:
    """Return the metric, negated if higher values are better."""
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


def _results(studies: Studies) -> Cells:
    dense, winners = studies.get(DENSE), _best(studies)
    for name, study in studies.items():
        finals = final_records(study, dense)
        tuned = [record for record in finals if record["source"] == TUNED]
        moved = [record for record in finals if record["source"] == TRANSFERRED]
        if not moved and dense is not None and shares(study, dense):
            moved = tuned
        returned = [record for record in finals if record["source"] == RETURNED]
        best, states = winners.get(name), [t.state for t in study.get_trials() if counts(t)]
        known = {} if best is None else best.user_attrs
        yield (
            name,
            None if best is None else best.values[0],
            *_mean(tuned),
            len(tuned),
            *_mean(moved),
            *_mean(returned),
            *(known.get(key) for key in (*_SIZES, "epochs")),
            *(states.count(s) for s in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)),
        )


def _final_runs(studies: Studies) -> Cells:
    dense = studies.get(DENSE)
    for name, study in studies.items():
        for record in final_records(study, dense):
            of = name if record["source"] != RETURNED else DENSE
            tuned = {TUNED: name, TRANSFERRED: DENSE, RETURNED: name}[record["source"]]
            test = "diverged" if record["diverged"] else record["test"]
            yield of, f"{tuned}'s", record["seed"], record["validation"], test


def _mean(records: list[Row]) -> tuple[Any, float | None]:
    """Return mean and standard deviation over seeds, or "diverged" if a run has.

    One seed has no deviation.
    """
    if any(record["diverged"] for record in records):
        return "diverged", None
    # Without a test metric the final runs' validation takes its place.
    values = [r["test"] if r["test"] is not None else r["validation"] for r in records]
    if not values:
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def _winners(studies: Studies) -> Cells:
    winners = _best(studies)
    dense = winners[DENSE].params if DENSE in winners else {}
    for name, best in winners.items():
        for parameter, value in best.params.items():
            yield name, parameter, value, dense.get(parameter)


def _scatter(studies: Studies) -> Cells:
    points, (ratio, _) = [], sizes_of(studies)
    for name, study in studies.items():
        for trial in _complete(study):
            minus_ratio = -(trial.user_attrs.get(ratio) or 1.0)
            points.append((minus_ratio, _loss(study, trial), name, trial))
    # From the highest ratio down, a point is on the front if none before it was as good.
    front, best = set(), float("inf")
    for _, loss, name, trial in sorted(points, key=lambda point: point[:2]):
        if loss < best:
            front.add((name, trial.number))
            best = loss
    for _, _, name, trial in points:
        sizes, number = (trial.user_attrs.get(key) for key in _SIZES), trial.number
        yield name, number, trial.values[0], *sizes, (name, number) in front


def _parameters(studies: Studies) -> Cells:
    for name, trial in _top(studies):
        for parameter, value in trial.params.items():
            yield name, parameter, trial.number, value


def slowdown(studies: Studies) -> float | None:
    """Return how many times as long a CPU second took in the busiest winner as in the quietest."""
    known = [best.user_attrs for best in _best(studies).values()]
    rates = [
        sum(each["epoch_seconds"]) / sum(each["epoch_cpu_seconds"])
        for each in known
        if sum(each.get("epoch_seconds", ())) and sum(each.get("epoch_cpu_seconds", ()))
    ]
    return max(rates) / min(rates) if len(rates) > 1 else None


def _cpu_seconds(studies: Studies) -> Cells:
    for name, trial in _top(studies):
        if spent := trial.user_attrs.get("epoch_cpu_seconds"):
            yield name, trial.number, statistics.mean(spent)


def _convergence(studies: Studies) -> Cells:
    for name, best in _best(studies).items():
        for epoch, value in enumerate(best.user_attrs.get("curve", []), start=1):
            yield name, epoch, value


def _epochs(studies: Studies) -> Cells:
    for name, trial in _top(studies):
        known = trial.user_attrs
        if "best_epoch" in known:
            yield name, trial.number, known["best_epoch"] + 1, known["epochs"]


def _settings(studies: Studies) -> Cells:
    """Yield the rules of the studies; those that all share once."""
    rules = {name: study.user_attrs.get(RULES, {}) for name, study in studies.items()}
    for setting in dict.fromkeys(key for known in rules.values() for key in known):
        values = {name: known.get(setting) for name, known in rules.items()}
        texts = {n: json.dumps(v).replace('"', "") for n, v in values.items()}
        if len(set(texts.values())) == 1:
            texts = {"all": texts.popitem()[1]}
        for name, text in texts.items():
            if text not in ("null", "{}", "[]"):
                yield name, setting, text


def _importance(studies: Studies) -> Cells:
    for name, study in studies.items():
        done = _complete(study)
        # Fewer say nothing, and one value everywhere leaves nothing to explain.
        if len(done) < 4 or len({trial.values[0] for trial in done}) < 2:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "PedAnovaImportanceEvaluator computes")  # of the loss
            found = optuna.importance.get_param_importances(
                study,
                evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                target=functools.partial(_loss, study) if len(study.directions) > 1 else None,
            )
        for parameter, importance in found.items():
            yield name, parameter, importance
