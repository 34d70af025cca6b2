"""Report an experiment: Markdown with SVG plots, CSV tables, and one self-contained HTML page."""

import base64
import hashlib
import html
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.storages import BaseStorage

from lightning_gc.compressors import COMPRESSORS
from lightning_gc.core.refusal import refuse
from lightning_gc.methods import plot_style, text_table
from lightning_gc.methods.method import DENSE
from lightning_gc.tuning.final_runs import RETURNED
from lightning_gc.tuning.journal import open_storage
from lightning_gc.tuning.tables import (
    TOP,
    ReportTable,
    Row,
    Studies,
    is_log,
    rules_of,
    sizes_of,
    slowdown,
    tables,
)

_SECTIONS = {
    "results": (
        "Results",
        "Each method with its own hyper-parameters, and with the dense winner's: mean and standard "
        "deviation of the test metric over seeds. The winner was chosen on the validation metric "
        "alone. Bytes are one worker's in a run. Trials are complete + pruned + failed.",
    ),
    "transfer": (
        "Tuned, or with the dense winner's hyper-parameters",
        "Mean and deviation of the test metric over seeds. If a method does worse with its own "
        "hyper-parameters than with the dense winner's, its study has not been tuned to its end.",
    ),
    "winners": (
        "Best hyper-parameters",
        "The hyper-parameters of each winner and of the dense winner.",
    ),
    "metric_against_ratio": (
        "Metric against compression ratio",
        "Every complete trial. Trials further right and with a better metric are better. The "
        "ringed trials are the Pareto front: none is better in both.",
    ),
    "tuned": (
        "Best values of {}",
        f"The best trials of each study: up to {TOP}, or a third of the complete ones. The star is "
        "the winner.",
    ),
    "seconds": (
        "Seconds per step",
        "Not compared, because the runs of a study are made at different times, and a machine gets "
        "busy.{} lightning-gc bench measures methods in turns, from the same file.",
    ),
    "cpu_seconds": (
        "CPU time per epoch",
        "CPU time of one worker for an epoch of training, with compression. Mean over the epochs "
        "of each of the best trials.",
    ),
    "convergence": ("Convergence", "The validation metric of the best trial, epoch by epoch."),
    "epochs_to_converge": (
        "Epochs to the best validation",
        "The epoch of the best validation, in the best trials.",
    ),
    "final_runs": (
        "Final runs",
        "Each final run by itself: the method that trained, the method whose winner has these "
        "hyper-parameters, and the seed. Equal seeds begin with equal weights.",
    ),
    "settings": (
        "Settings",
        "The studies fix these values, and draw from these ranges (`space`).",
    ),
    "importance": (
        "Importance of the hyper-parameters",
        "Share of the metric's variation that each parameter explains. Studies with fewer than 4 "
        "complete trials are left out.",
    ),
}
"""Table or plot -> heading and text of its section. Values of a parameter begin with ``tuned_``."""
MOVED = "test_with_dense_hyper_parameters"
TRIALS, SEEDS = 10, 3
"""Fewest trials and seeds of method and dense that allow a verdict."""
BUSY = 1.2
"""Ratio of seconds per CPU second of two runs, from which the report says it."""
_ALONE = (
    " With one worker nothing is sent. Encoded bytes are the bytes that it would send: the "
    "gradients' payloads and uncompressed tensors, without lengths and further rounds. The "
    "encoding ratio is the gradients' bytes over the encoded bytes."
)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #8886; padding: 0.2em 0.8em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
"""


@dataclass(frozen=True)
class Section:
    """A heading with a text, a table to be read, and a plot."""

    title: str
    text: str
    table: ReportTable | None = None
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
        ValueError: the journal does not exist, or the storage does not hold the experiment, or it
            holds several and none was named. The folder has other files of these names.
        StorageError: the storage cannot be used.
    """
    return write(Path(out), *find_studies(storage, experiment))


def find_studies(
    storage: str | Path | BaseStorage, experiment: str | None = None
) -> tuple[str, Studies]:
    """Return an experiment's name and its studies by method; as for ``report``."""
    is_path = not isinstance(storage, BaseStorage) and "://" not in str(storage)
    # open_storage would create a missing journal: here the path is mistyped.
    if is_path and not Path(str(storage)).is_file():
        refuse(f"The journal {storage} does not exist. lightning-gc tune makes one")
    storage = open_storage(storage)
    names = optuna.get_all_study_names(storage=storage)
    held = sorted({name.partition("/")[0] for name in names if "/" in name})
    it_holds = f"It holds {', '.join(held) or 'none'}"
    if not experiment and len(held) != 1:
        refuse(f"Name the experiment to report on. {it_holds}")
    experiment = experiment or held[0]
    studies = {
        name.partition("/")[2]: optuna.load_study(study_name=name, storage=storage)
        for name in names
        if name.startswith(f"{experiment}/")
    }
    if not studies:
        refuse(f"The storage holds no experiment {experiment!r}. {it_holds}")
    return experiment, studies


def write(out: Path, experiment: str, studies: Studies) -> list[Path]:
    """Write the files of ``report`` and return their paths."""
    found = tables(studies)
    drawn = plots(studies, found)
    sections = _sections(found, drawn, sizes_of(studies), slowdown(studies))
    page = out / "report.html"
    files = {page: _page(experiment, studies, sections, drawn).encode()}
    files[out / "report.md"] = _markdown(experiment, studies, sections).encode()
    files |= {out / "plots" / f"{file_name(name)}.svg": svg for name, svg in drawn.items()}
    for name, table in found.items():
        files[out / "tables" / f"{name}.csv"] = table.to_csv().encode()
    there = [file for file in files if file.exists()]
    if there and not (page.is_file() and page.read_bytes().startswith(_HEAD.encode())):
        refuse(f"{there[0]} is not of a report and would be overwritten. Give another folder")
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return list(files)


def results_text(studies: Studies, width: int) -> str:
    """Return the results for a terminal: a table, and a sentence for each compressed method."""
    found, (size, _) = tables(studies), sizes_of(studies)
    rules = rules_of(studies)
    metric, tested = rules["metric"], rules.get("test_metric") or rules["metric"]
    ratio = "ratio of bytes" if size == "ratio" else "ratio of encoded bytes"
    final, transferred = f"{tested},\nfinal runs", f"{tested},\ndense's hyper-parameters"
    heads = ("method", metric, final, transferred, ratio, "best hyper-parameters")
    values: dict[str, list[str]] = {}
    for row in found["winners"].rows:
        values.setdefault(row["method"], []).append(f"{row['parameter']}={_cell(row['value'])}")
    cells = [
        [
            row["method"],
            _cell(row["validation"]),
            _with_spread(row, "test"),
            _with_spread(row, MOVED),
            _cell(row[size]),
            ", ".join(values.get(row["method"], [])),
        ]
        for row in found["results"].rows
    ]
    better = f"{'Lower' if rules['mode'] == 'min' else 'Higher'} {metric} is better."
    table = text_table.plain(heads, cells, width)
    return "\n".join([f"{table}\n{better}", *findings(studies, found["results"])])


def findings(studies: Studies, results: ReportTable) -> list[str]:
    """Return a sentence for each compressed method: its result compared with dense's, its bytes.

    A difference is "more than the spread" if it exceeds ``sqrt(s² + d²)``, for the standard
    deviations of method and dense over seeds, and two standard errors. A method that does worse
    than with dense's hyper-parameters, by more than the spread, is not tuned to its end. If dense
    training does better with any method's hyper-parameters than with its own, by more than the
    spread, then dense is not, and no method gets a verdict. Fewer than ``TRIALS`` trials or
    ``SEEDS`` seeds give none either.

    Args:
        studies: of the experiment.
        results: the table of that name.
    """
    size, _ = sizes_of(studies)
    rows = {row["method"]: row for row in results.rows}
    sign = 1 if rules_of(studies)["mode"] == "min" else -1
    better = _better_dense(rows, sign)
    return [
        f"{name} {_ending(row, rows.get(DENSE), sign, better)}{_saving(row[size], size)}."
        for name, row in rows.items()
        if name != DENSE
    ]


def _better_dense(rows: Mapping[str, Row], sign: int) -> str:
    """Return the method with dense training's best hyper-parameters, if not dense; or ""."""
    dense = rows.get(DENSE, {})
    own, best = _figures(dense, "test"), ""
    least = own
    for name, row in rows.items():
        other = _figures(row, RETURNED)
        if own is None or least is None or other is None:
            continue
        noise = _noise(own[1], other[1], min(row["seeds"], dense["seeds"]))
        if sign * (own[0] - other[0]) > noise and sign * (least[0] - other[0]) > 0:
            least = other
            best = f"{_with_spread(row, RETURNED)} with {name}'s hyper-parameters"
    return best and f"{best}, {_with_spread(dense, 'test')} with its own"


def _figures(row: Row, column: str) -> tuple[float, float] | None:
    """Return a mean over seeds and its deviation; None if one of them is missing."""
    value, spread = row.get(column), row.get(f"{column}_spread")
    return (value, spread) if isinstance(value, float | int) and spread is not None else None


def _missing(row: Row, dense: Row | None) -> str:
    """Return what a comparison lacks, or ""."""
    if row["validation"] is None:
        return "has no result, because no trial has completed within its budget"
    if dense is None or dense["validation"] is None:
        return "cannot be compared, because dense has no result"
    if row["test"] == "diverged":
        return "diverged in a final run"
    if dense["test"] == "diverged":
        return "cannot be compared, because dense diverged in a final run"
    if row["test"] is None or dense["test"] is None:
        own, other = _cell(row["validation"]), _cell(dense["validation"])
        return f"ends at {own} in its best trial, dense at {other} (no verdict without final runs)"
    return ""


def _ending(row: Row, dense: Row | None, sign: int, better: str) -> str:
    missing = _missing(row, dense)
    if missing or dense is None:
        return missing
    own, moved, seeds = _figures(row, "test"), _figures(row, MOVED), row["seeds"]
    if own and moved and sign * (own[0] - moved[0]) > _noise(own[1], moved[1], seeds):
        both = f"{_cell(own[0])} tuned, {_cell(moved[0])} with dense's hyper-parameters"
        return f"is not tuned to its end: it needs more trials ({both})"
    value, seeds = _with_spread(row, "test"), min(seeds, dense["seeds"])
    if better:
        return f"ends at {value} (no verdict: dense is not tuned to its end, it reaches {better})"
    trials = min(each["complete"] + each["pruned"] + each["failed"] for each in (row, dense))
    if trials < TRIALS or seeds < SEEDS:
        values = f"{value}, dense at {_with_spread(dense, 'test')}"
        few = f"{trials} trials and {_counted(seeds, 'seed')}; {TRIALS} and {SEEDS} are needed"
        return f"ends at {values} (no verdict from {few})"
    noise = _noise(row["test_spread"], dense["test_spread"], seeds)
    if abs(row["test"] - dense["test"]) <= noise:
        return f"ends within the spread of dense over {seeds} seeds"
    apart = _apart(row["test"], dense["test"], noise)
    text = f"ends {apart}, more than the spread over {seeds} seeds"
    if moved and abs(moved[0] - dense["test"]) <= _noise(moved[1], dense["test_spread"], seeds):
        return f"{text} (within it with dense's hyper-parameters)"
    return text


def _noise(spread: float, other: float, seeds: int) -> float:
    """Return the least difference of two means over seeds that counts."""
    return math.hypot(spread, other) * max(1.0, 2 / math.sqrt(seeds))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _apart(value: float, dense: float, noise: float) -> str:
    """Return how far a mean is from dense's: as a share, a factor, or near zero a difference."""
    side = "above" if value > dense else "below"
    if value * dense <= 0 or abs(dense) < 3 * noise:
        return f"{abs(value - dense):.3g} {side} dense ({_cell(value)} against {_cell(dense)})"
    if abs(value) > 2 * abs(dense):
        return f"at {value / dense:.3g} times dense's {_cell(dense)}"
    return f"{100 * abs(value / dense - 1):.2g} % {side} dense"


def _saving(ratio: float | None, size: str) -> str:
    if not ratio:
        return ""
    what = "bytes" if size == "ratio" else "encoded bytes"
    if 0.95 < ratio < 1.05:
        return f", at as many {what}"
    times = max(ratio, 1 / ratio)
    shown = f"{times:.3g}" if times < 100 else f"{times:,.0f}"
    return f", at {shown}x {'fewer' if ratio > 1 else 'more'} {what}"


def file_name(name: str) -> str:
    """Return the name of a plot's file, without its ending; no two plots have the same.

    Most names do not change. In other names, which may come from somebody else's study, special
    characters are replaced, and a part of a hash is added.

    Example:
        >>> file_name("tuned_compressor.density"), file_name("tuned_../../X")
        ('tuned_compressor.density', 'tuned_.._.._x-051dee41')
    """
    if re.fullmatch(r"[a-z0-9_.-]{1,80}(?<!-[0-9a-f]{8})", name):
        return name
    kept = re.sub(r"[^a-z0-9_.-]", "_", name[:80].lower())
    return f"{kept}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _sections(
    found: dict[str, ReportTable],
    drawn: dict[str, bytes],
    sizes: tuple[str, str],
    slower: float | None,
) -> list[Section]:
    def section(name: str, table: ReportTable | None = None, plot: str | None = None) -> Section:
        parameter = name.removeprefix("tuned_")
        title, text = _SECTIONS[name if name in _SECTIONS else "tuned"]
        return Section(title.format(parameter), text, table, plot)

    results = section("results", _summary(found["results"], sizes))
    winners = section("winners", found["winners"])
    first = [section("transfer", plot="transfer")] if "transfer" in drawn else []
    others = [section(name, plot=name) for name in drawn if name != "transfer"]
    last = [section(name, found[name]) for name in ("final_runs", "settings") if found[name].rows]
    return [results, *first, winners, *others, _seconds(slower), *last]


def _seconds(slower: float | None) -> Section:
    """Return the section that says why wall-clock seconds are not compared."""
    title, text = _SECTIONS["seconds"]
    times = f" Here one run took {slower or 1:.2g} times as long as another for the same CPU time."
    return Section(title, text.format(times if slower is not None and slower >= BUSY else ""))


def _summary(results: ReportTable, sizes: tuple[str, str]) -> ReportTable:
    """Return the results in as few columns as fit a page."""
    rows = tuple(
        {
            "method": row["method"],
            "validation": row["validation"],
            "test": _with_spread(row, "test"),
            "with_dense's": _with_spread(row, MOVED),
            "seeds": row["seeds"],
            **{size: row.get(size) for size in sizes},
            "epochs": row.get("epochs"),
            "trials": f"{row['complete']} + {row['pruned']} + {row['failed']}",
        }
        for row in results.rows
    )
    return ReportTable(tuple(rows[0]), rows)


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
    found = "".join(f"- {sentence}\n" for sentence in findings(studies, tables(studies)["results"]))
    lines = [f"# {experiment}", "", found, _introduction(studies), ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.text, ""]
        if section.table is not None:
            heads = [column.replace("_", " ") for column in section.table.columns]
            lines.append(text_table.markdown(heads, _cells(section.table)))
        if section.plot is not None:
            lines += [f"![{section.title}](plots/{file_name(section.plot)}.svg)", ""]
    return "\n".join(lines)


_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width">'
)


def _page(
    experiment: str, studies: Studies, sections: list[Section], drawn: dict[str, bytes]
) -> str:
    name = html.escape(experiment)
    items = (html.escape(each) for each in findings(studies, tables(studies)["results"]))
    found = "".join(f"<li>{item}</li>" for item in items)
    parts = [f"<h1>{name}</h1><ul>{found}</ul><p>{html.escape(_introduction(studies))}</p>"]
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
        f"{_HEAD}<title>{name}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _cells(table: ReportTable) -> list[list[str]]:
    return [[_cell(row.get(column)) for column in table.columns] for row in table.rows]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def plots(studies: Studies, tables: dict[str, ReportTable]) -> dict[str, bytes]:
    """Return ``{name: SVG}``; a plot that would be empty is left out."""
    metric = rules_of(studies)["metric"]
    found: dict[str, bytes] = {}

    def draw(name: str, how: Callable[..., None], table: str = "", **settings: Any) -> None:
        if rows := tables[table or name].rows:
            found[name] = _svg(how, rows, **settings)

    draw("metric_against_ratio", _scatter, metric=metric, ratio=sizes_of(studies)[0])
    draw("transfer", _transfer, table="results")
    tuned = tables["tuned_parameters"].rows
    for parameter in sorted({row["parameter"] for row in tuned}):
        chosen = [row for row in tuned if row["parameter"] == parameter]
        if all(isinstance(row["value"], int | float) for row in chosen):
            shown = {"column": "value", "label": parameter, "log": is_log(studies, parameter)}
            found[f"tuned_{parameter}"] = _svg(_spreads, chosen, **shown)
    draw("cpu_seconds", _spreads, column="cpu_seconds", label="CPU seconds per epoch")
    draw("convergence", _curves, metric=metric)
    draw("epochs_to_converge", _spreads, column="best_epoch", label="best epoch")
    draw("importance", _bars)
    return found


def _svg(how: Callable[..., None], rows: Iterable[Row], **settings: Any) -> bytes:
    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        how(axes, rows, **settings)
        if axes.get_legend_handles_labels()[1]:
            plot_style.legend(figure)

    return plot_style.svg(draw, "lightning_gc")


def _by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def _looks(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colours of the methods' families, with a marker and dashes for each member."""
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        # A method is named by the user, as a rule after its compressor.
        name = max((name for name in COMPRESSORS if method.startswith(name)), key=len, default="")
        kind = COMPRESSORS[name].examples()[0].traits.kind if name else "dense"
        known = name or method == DENSE
        colour = plot_style.colour_of(kind, name) if known else plot_style.PEER
        family = sum(look["color"] == colour for look in found.values())
        found[method] = {
            "color": colour,
            "marker": plot_style.MARKERS[family % len(plot_style.MARKERS)],
            "linestyle": ("-", "--", ":", "-.")[family % 4],
        }
    return found


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Give each method a row, the first at the top."""
    figure: Any = axes.figure
    figure.set_size_inches(plot_style.WIDTH, 1.5 + 0.4 * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _scatter(axes: Axes, rows: tuple[Row, ...], metric: str, ratio: str) -> None:
    groups = _by_method(rows)
    for method, look in _looks(groups).items():
        points = groups[method]
        x, y = [p[ratio] or 1.0 for p in points], [p["metric"] for p in points]
        axes.plot(x, y, alpha=0.8, label=method, **{**look, "linestyle": "none"})
    front = sorted((p[ratio] or 1.0, p["metric"]) for p in rows if p["on_front"])
    line: Any = {"color": plot_style.INK, "lw": 1, "marker": "o", "ms": 10, "mfc": "none"}
    axes.plot(*zip(*front, strict=True), label="Pareto front", **line)
    of = {"ratio": "compression ratio", "encoding_ratio": "encoding ratio (nothing is sent)"}
    plot_style.plain_log(axes.xaxis)
    axes.set(xlabel=of[ratio], ylabel=metric)
    _log_if_wide(axes, [p["metric"] for p in rows])


def _transfer(axes: Axes, rows: tuple[Row, ...]) -> None:
    """Draw each method twice: tuned, and with dense's hyper-parameters."""
    _name_rows(axes, [row["method"] for row in rows])
    looks = zip(plot_style.SERIES, plot_style.MARKERS, strict=True)
    for offset, column, label in ((-0.14, "test", "tuned"), (0.14, MOVED, "dense's")):
        known = [(i, r) for i, r in enumerate(rows) if isinstance(r[column], int | float)]
        colour, marker = next(looks)
        axes.errorbar(
            [r[column] for _, r in known],
            [i + offset for i, _ in known],
            xerr=[r[f"{column}_spread"] or 0.0 for _, r in known],
            fmt=marker,
            color=colour,
            capsize=4,
            label=f"{label} hyper-parameters",
        )
    axes.set_xlabel("test metric, mean and deviation over seeds")


def _spreads(axes: Axes, rows: Iterable[Row], column: str, label: str, log: bool = False) -> None:
    """Draw the values of the best trials, their quartiles, and a star for the winner."""
    groups = _by_method(rows)
    _name_rows(axes, list(groups))
    for place, look in enumerate(_looks(groups).values()):
        values = [row[column] for row in list(groups.values())[place]]
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            axes.plot([low, high], [place] * 2, color=plot_style.GRID, lw=12, zorder=1)
            axes.lines[-1].set_solid_capstyle("butt")
            axes.plot(middle, place, "|", color=plot_style.MUTED, ms=12, zorder=2)
        axes.scatter(values, [place] * len(values), s=20, color=look["color"], zorder=3)
        # A study's rows come best first.
        axes.scatter(values[0], place, s=130, marker="*", color=plot_style.INK, zorder=4)
    axes.set_xlabel(f"{label}, best trials")
    if log:
        plot_style.plain_log(axes.xaxis)


def _curves(axes: Axes, rows: tuple[Row, ...], metric: str) -> None:
    groups = _by_method(rows)
    for method, look in _looks(groups).items():
        points = groups[method]
        epochs = [p["epoch"] for p in points]
        axes.plot(epochs, [p["metric"] for p in points], label=method, ms=5, **look)
    axes.set(xlabel="epoch", ylabel=f"{metric}, best trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _log_if_wide(axes, [p["metric"] for p in rows])


def _bars(axes: Axes, rows: tuple[Row, ...]) -> None:
    methods = list(_by_method(rows))
    parameters = sorted({row["parameter"] for row in rows})
    known = {(row["method"], row["parameter"]): row["importance"] for row in rows}
    _name_rows(axes, methods)
    width = 0.8 / len(parameters)
    for i, parameter in enumerate(parameters):
        shares = [known.get((method, parameter), 0.0) for method in methods]
        places = [place + (i - (len(parameters) - 1) / 2) * width for place in range(len(methods))]
        axes.barh(places, shares, width, label=parameter)
    axes.set_xlabel("importance (PED-ANOVA)")


def _log_if_wide(axes: Axes, values: list[Any]) -> None:
    if min(values) > 0 and max(values) > 10 * min(values):
        plot_style.plain_log(axes.yaxis)
