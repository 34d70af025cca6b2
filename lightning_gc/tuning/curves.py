"""Write a study's final runs for TensorBoard: their curves, and one page HPARAMS for all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_gc.lightning.monitor.dashboard import OURS, named_hparams
from lightning_gc.methods.method import DENSE
from lightning_gc.tuning.final_runs import RETURNED, TUNED, final_records
from lightning_gc.tuning.report import file_name
from lightning_gc.tuning.tables import Row, Studies, rules_of, sizes_of

FILE = "events.out.tfevents.0.lightning_gc"
"""The only file of a run's folder. Its name is always the same, so a later call replaces it."""


def write_curves(experiment: str, studies: Studies, out: str | Path) -> list[Path]:
    """Write one TensorBoard run for each final run: ``out/name/method/seed_0``, ...

    A run has every metric that the model logged, by validation, and the ratio and bytes of the
    whole run. Runs with dense's hyper-parameters have ``(dense's)`` after their method, and dense
    runs with a method's hyper-parameters its name, such as ``dense (qsgd's)``. The page
    HPARAMS has a row per run. Its columns are the hyper-parameters that differ between runs,
    learning rates and the method first. Then come the metric, the test metric, ratio and bytes.

    Final runs of earlier versions have kept the metric alone.

    Args:
        experiment: its name.
        studies: of the experiment, by method.
        out: TensorBoard's ``--logdir``.

    Returns:
        The files.
    """
    root, dense = Path(out, file_name(experiment)), studies.get(DENSE)
    runs = {
        root / _folder(method, record) / FILE: _row(method, record, studies)
        for method, study in studies.items()
        for record in final_records(study, dense)
    }
    if not runs:
        return []
    from torch.utils.tensorboard import summary

    rows = [settings for settings, *_ in runs.values()]
    names, rules = differing(rows), rules_of(studies)
    columns = {name: f"{place:02d} {name}" for place, name in enumerate(names)}
    known = {columns[n]: next(row[n] for row in rows if n in row) for n in names}
    metrics = filter(None, (rules["metric"], _test_tag(rules), *_OURS))
    named = {tag: tag.removeprefix(OURS) for tag in metrics}
    # TensorBoard sorts hyper-parameters by name, and shows another one: without the number.
    columns_of_page, _, _ = named_hparams(known, named, lambda name: name.partition(" ")[2])
    _write(root / FILE, [(0, columns_of_page)])
    for path, (settings, curves, totals) in runs.items():
        shown = {columns[name]: settings[name] for name in names if name in settings}
        records = [(0, record) for record in summary.hparams(shown, {})[1:]]
        for name, values in {**curves, **{name: [value] for name, value in totals.items()}}.items():
            records += [(i, summary.scalar(name, v)) for i, v in enumerate(values) if v is not None]
        _write(path, records)
    return [root / FILE, *runs]


_OURS = (f"{OURS}ratio", f"{OURS}bytes")
"""Tags of a run's totals."""


def _folder(method: str, record: Row) -> str:
    """Return the name of a final run, as TensorBoard shows it."""
    return f"{_name(file_name(method), record)}/seed_{record['seed']}"


def _name(method: str, record: Row) -> str:
    names = {TUNED: method, RETURNED: f"{DENSE} ({method}'s)"}
    return names.get(record["source"], f"{method} (dense's)")


def _row(method: str, record: Row, studies: Studies) -> tuple[Row, Row, Row]:
    """Return a final run's settings, curves and totals."""
    rules, sizes = rules_of(studies), sizes_of(studies)
    settings = {"method": _name(method, record), **record["params"]}
    curves = record.get("logged") or {rules["metric"]: record["curve"]}
    totals = dict(zip(_OURS, map(record.get, sizes), strict=True))
    if tag := _test_tag(rules):
        totals[tag] = record["test"]
    return settings, curves, totals


def _test_tag(rules: Row) -> str:
    """Return the tag of the test metric, which may be called as the validation metric is."""
    name = rules.get("test_metric") or ""
    return f"{name} (test)" if name == rules["metric"] else name


def is_rate(name: str) -> bool:
    """Return whether a hyper-parameter is a learning rate, by its name."""
    last = re.split(r"[./]", name)[-1].lower()
    return last == "lr" or last.endswith("learning_rate")


def differing(rows: list[Row]) -> list[str]:
    """Return the names of settings that differ between rows, learning rates first."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
    return sorted(found, key=lambda name: not is_rate(name))


def _write(path: Path, records: Iterable[tuple[int, Any]]) -> None:
    """Write an event file, in place of the one of an earlier call."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(file_version="brain.Event:2").SerializeToString())
        for step, summary in records:
            writer.write(Event(step=step, summary=summary).SerializeToString())
