"""Write a study's final runs for TensorBoard: their curves, and the HPARAMS page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_gc.methods.method import DENSE
from lightning_gc.tuning.final_runs import TUNED, final_records
from lightning_gc.tuning.report import file_name
from lightning_gc.tuning.tables import Studies, rules_of, sizes_of

_FILE = "events.out.tfevents.0.lightning_gc"
"""The only file that a run's folder gets. Its name is always the same, so it is replaced."""

Run = tuple[str, str, Mapping[str, Any]]
"""Folder, method, record of a final run."""


def write_curves(studies: Studies, out: Path) -> list[Path]:
    """Write one TensorBoard run for each final run: ``out/<method>/seed_0``, ...

    A run has each metric that the model logged, validation by validation, and the ratio and bytes
    of the whole run. Runs with dense's hyper-parameters are ``out/<method>, dense's/seed_0``. The
    HPARAMS page has a column for each setting that differs between runs.

    Args:
        studies: of one experiment, by method.
        out: folder of the experiment; files of an earlier call are replaced.

    Returns:
        The files.
    """
    runs = list(_runs(studies))
    columns, metrics = _columns(studies, runs)
    files = {out / _FILE: [(0, _experiment(columns, metrics))]} if runs else {}
    for folder, method, record in runs:
        values = {**_settings(method, record), **record["params"], "seed": record["seed"]}
        shown = {name: values[name] for name in columns if name in values}
        files[out / folder / _FILE] = [*_sessions(shown), *_scalars(record, metrics)]
    for path, records in files.items():
        _write(path, records)
    return list(files)


def _runs(studies: Studies) -> Iterator[Run]:
    for method, study in studies.items():
        for record in final_records(study, studies.get(DENSE)):
            own = "" if record["source"] == TUNED else ", dense's"
            yield f"{file_name(method)}{own}/seed_{record['seed']}", method, record


def _settings(method: str, record: Mapping[str, Any]) -> dict[str, str]:
    return {"method": method, "tuned": "yes" if record["source"] == TUNED else "dense's"}


def _columns(studies: Studies, runs: list[Run]) -> tuple[list[str], dict[str, str]]:
    """Return settings that differ between runs, learning rates first, and ``{tag: name}``."""
    rows = [{**_settings(method, r), **r["params"], "seed": r["seed"]} for _, method, r in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    differ = [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
    columns = sorted(differ, key=lambda name: not _is_rate(name))
    rules, (ratio, nbytes) = rules_of(studies), sizes_of(studies)
    metrics = {rules["metric"]: rules["metric"]}
    if rules.get("test_metric"):
        metrics[rules["test_metric"]] = rules["test_metric"]
    return columns, metrics | {f"~{ratio}": ratio, f"~{nbytes}": nbytes}


def _is_rate(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "lr" or "learning_rate" in last
