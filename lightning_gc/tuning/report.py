"""Report of an experiment: Markdown with plots beside it, and one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from lightning_gc.core import text_table
from lightning_gc.tuning.journal import open_storage
from lightning_gc.tuning.plots import plots
from lightning_gc.tuning.tables import TOP, Studies, Table, rules_of, sizes_of, tables

_TEXTS = {
    "results": "Each method with hyper-parameters of its own, and the same method with those of "
    "the dense winner: mean and standard deviation of the test metric over seeds. The winner was "
    "chosen on the validation metric alone. Bytes are those of one worker in a run; trials are "
    "complete + pruned + failed.",
    "transfer": "What tuning each method by itself gains.",
    "winners": "The hyper-parameters of each winner, beside those of the dense winner.",
    "metric_against_ratio": "Every complete trial. Right and towards the better metric is "
    "better; the line joins the trials that no other beats in both.",
    "tuned": f"The best trials of each study: up to {TOP}, or a third of the complete ones. "
    "The star is the winner.",
    "seconds_per_step": "Of one worker, in the best trial, by the wall clock.",
    "cpu_seconds": "CPU time of the process in an epoch of training, with compression, over its "
    "workers, as the thesis measures it: the mean over a trial's epochs, in the best trials.",
    "convergence": "The validation metric of the best trial, epoch by epoch.",
    "epochs_to_converge": "The epoch of the best validation, in the same trials.",
    "importance": "How much of what makes a trial good each parameter explains. Studies of fewer "
    "than 4 complete trials are left out.",
}
_ALONE = (
    " With one worker nothing is sent. Encoded bytes are what it would have to say in a run: its "
    "gradients' payloads, and what goes whole, without lengths and further rounds; the encoding "
    "ratio is the gradients' bytes over these."
)
_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ccc; padding: 0.2em 0.8em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
"""


@dataclass(frozen=True)
class Section:
    """A heading with a text, a table to be read, and a plot."""

    title: str
    text: str
    table: Table | None = None
    plot: str | None = None


def report(
    storage: str | Path | BaseStorage, out: str | Path, experiment: str | None = None
) -> list[Path]:
    """Write ``report.md``, ``report.html``, ``plots/*.svg`` and ``tables/*.csv``.

    Args:
        storage: as for ``tune``.
        out: folder for the files; created if missing.
        experiment: its name; may be left out if the storage holds a single one.

    Returns:
        The files.

    Raises:
        ValueError: there is no such journal; the storage holds no such experiment, or several and
            none was named.
        StorageError: the storage cannot be used.
    """
    is_path = not isinstance(storage, BaseStorage) and "://" not in str(storage)
    # open_storage would create a missing journal: here the path is mistyped.
    if is_path and not Path(str(storage)).is_file():
        raise ValueError(f"There is no journal {storage}; lightning-gc tune makes one.")
    storage = open_storage(storage)
    names = optuna.get_all_study_names(storage=storage)
    held = sorted({name.partition("/")[0] for name in names if "/" in name})
    it_holds = f"it holds {', '.join(held) or 'none'}"
    if not experiment and len(held) != 1:
        raise ValueError(f"Name the experiment to report on; {it_holds}.")
    experiment = experiment or held[0]
    studies = {
        name.partition("/")[2]: optuna.load_study(study_name=name, storage=storage)
        for name in names
        if name.startswith(f"{experiment}/")
    }
    if not studies:
        raise ValueError(f"The storage holds no experiment {experiment!r}; {it_holds}.")
    out = Path(out)
    found = tables(studies)
    drawn = plots(studies, found)
    sections = _sections(found, drawn, sizes_of(studies))
    files = {out / "plots" / f"{file_name(name)}.svg": svg for name, svg in drawn.items()}
    files[out / "report.md"] = _markdown(experiment, studies, sections).encode()
    files[out / "report.html"] = _page(experiment, studies, sections, drawn).encode()
    for name, table in found.items():
        files[out / "tables" / f"{name}.csv"] = table.to_csv().encode()
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return list(files)


def file_name(name: str) -> str:
    """Return the name of a plot's file, without its ending; no two plots have the same.

    Most names stay as they are. In others, which may come from somebody else's study, all that a
    path or a system may read in its own way is replaced, and a part of a hash is added.

    Example:
        >>> file_name("tuned_compressor.density"), file_name("tuned_../../X")
        ('tuned_compressor.density', 'tuned_.._.._x-051dee41')
    """
    if re.fullmatch(r"[a-z0-9_.-]{1,80}(?<!-[0-9a-f]{8})", name):
        return name
    kept = re.sub(r"[^a-z0-9_.-]", "_", name[:80].lower())
    return f"{kept}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _sections(
    found: dict[str, Table], drawn: dict[str, bytes], sizes: tuple[str, str]
) -> list[Section]:
    sections = [Section("Results", _TEXTS["results"], _summary(found["results"], sizes))]
    if "transfer" in drawn:
        sections.append(Section("Tuned or transferred", _TEXTS["transfer"], plot="transfer"))
    sections.append(Section("Winners", _TEXTS["winners"], found["winners"]))
    for name in drawn:
        if name != "transfer":
            kind = "tuned" if name.startswith("tuned_") else name
            title = name.replace("_", " ").capitalize()
            sections.append(Section(title, _TEXTS[kind], plot=name))
    return sections


def _summary(results: Table, sizes: tuple[str, str]) -> Table:
    """Return the results in as few columns as fit a page."""
    rows = tuple(
        {
            "method": row["method"],
            "validation": row["validation"],
            "test": _with_spread(row, "test"),
            "with_dense's": _with_spread(row, "test_with_dense_hyper_parameters"),
            "seeds": row["seeds"],
            **{size: row.get(size) for size in sizes},
            "epochs": row.get("epochs"),
            "trials": f"{row['complete']} + {row['pruned']} + {row['failed']}",
        }
        for row in results.rows
    )
    return Table(tuple(rows[0]), rows)


def _with_spread(row: dict[str, Any], column: str) -> str:
    value, spread = row[column], row[f"{column}_spread"]
    return _cell(value) if spread is None else f"{_cell(value)} ± {spread:.2g}"


def _introduction(studies: Studies) -> str:
    rules = rules_of(studies)
    alone = rules["workers"] == 1
    workers = "1 worker" if alone else f"{rules['workers']} workers"
    return (
        f"{len(studies)} studies, one per method, selected on {rules['metric']} ({rules['mode']}), "
        f"{workers}. The table behind each plot is in tables/.{_ALONE if alone else ''}"
    )


def _markdown(experiment: str, studies: Studies, sections: list[Section]) -> str:
    lines = [f"# {experiment}", "", _introduction(studies), ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        if section.table is not None:
            heads = [column.replace("_", " ") for column in section.table.columns]
            lines.append(text_table.markdown(heads, _cells(section.table)))
        if section.plot is not None:
            lines += [f"![{section.title}](plots/{file_name(section.plot)}.svg)", ""]
    return "\n".join(lines)


def _page(
    experiment: str, studies: Studies, sections: list[Section], drawn: dict[str, bytes]
) -> str:
    name = html.escape(experiment)
    parts = [f"<h1>{name}</h1><p>{html.escape(_introduction(studies))}</p>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>")
        if section.table is not None:
            heads = "".join(f"<th>{c.replace('_', ' ')}</th>" for c in section.table.columns)
            body = "".join(
                f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
                for cells in _cells(section.table)
            )
            parts.append(f"<table><tr>{heads}</tr>{body}</table>")
        if section.plot is not None:
            data = base64.b64encode(drawn[section.plot]).decode()
            alt = html.escape(section.title)
            parts.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _cells(table: Table) -> list[list[str]]:
    return [[_cell(row.get(column)) for column in table.columns] for row in table.rows]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
