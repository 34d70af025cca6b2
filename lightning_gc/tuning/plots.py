"""SVG plots of the report, each drawn from one table."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_gc.tuning.tables import Row, Studies, Table, log_scaled, rules_of, sizes_of

# Makes plots reproducible to the byte.
_SVG: Any = {"svg.hashsalt": "lightning_gc", "svg.fonttype": "path"}


def plots(studies: Studies, tables: dict[str, Table]) -> dict[str, bytes]:
    """Return ``{name: SVG}``; a plot that would be empty is left out."""
    metric = rules_of(studies)["metric"]
    found: dict[str, bytes] = {}

    def draw(name: str, table: str, how: Callable[[Axes, tuple[Row, ...]], None]) -> None:
        if tables[table].rows:
            found[name] = _svg(how, tables[table].rows)

    scatter = functools.partial(_scatter, metric=metric, ratio=sizes_of(studies)[0])
    draw("metric_against_ratio", "metric_against_ratio", scatter)
    draw("transfer", "results", _transfer)
    tuned = tables["tuned_parameters"].rows
    for parameter in sorted({row["parameter"] for row in tuned}):
        chosen = [row for row in tuned if row["parameter"] == parameter]
        if all(isinstance(row["value"], int | float) for row in chosen):
            log = log_scaled(studies, parameter)
            boxes = functools.partial(_boxes, column="value", label=parameter, log=log)
            found[f"tuned_{parameter}"] = _svg(boxes, chosen)
    draw("seconds_per_step", "seconds_per_step", _stacks)
    times = functools.partial(_boxes, column="cpu_seconds", label="CPU seconds per epoch")
    draw("cpu_seconds", "cpu_seconds", times)
    draw("convergence", "convergence", lambda axes, rows: _curves(axes, rows, metric))
    epochs = functools.partial(_boxes, column="best_epoch", label="best epoch")
    draw("epochs_to_converge", "epochs_to_converge", epochs)
    draw("importance", "importance", _bars)
    return found


def _svg(how: Callable[..., None], rows: Iterable[Row]) -> bytes:
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    how(axes, rows)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
    file = io.BytesIO()
    with mpl.rc_context(_SVG):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def _scatter(axes: Axes, rows: tuple[Row, ...], metric: str, ratio: str) -> None:
    for method, points in _by_method(rows).items():
        x, y = [p[ratio] or 1.0 for p in points], [p["metric"] for p in points]
        axes.scatter(x, y, s=22, alpha=0.7, label=method)
    front = sorted((p[ratio] or 1.0, p["metric"]) for p in rows if p["on_front"])
    axes.plot(*zip(*front, strict=True), color="black", linewidth=1, label="Pareto front")
    of = {"ratio": "compression ratio", "encoding_ratio": "encoding ratio (nothing is sent)"}
    axes.set(xscale="log", xlabel=of[ratio], ylabel=metric)
    _log_if_wide(axes, [p["metric"] for p in rows])


def _transfer(axes: Axes, rows: tuple[Row, ...]) -> None:
    """Draw each method tuned beside the same with dense's hyper-parameters."""
    key = "test_with_dense_hyper_parameters"
    for offset, column, label in ((-0.18, "test", "tuned"), (0.18, key, "dense's")):
        known = [(i, r) for i, r in enumerate(rows) if isinstance(r[column], int | float)]
        axes.errorbar(
            [i + offset for i, _ in known],
            [r[column] for _, r in known],
            [r[f"{column}_spread"] or 0.0 for _, r in known],
            fmt="o",
            capsize=4,
            label=f"{label} hyper-parameters",
        )
    axes.set_xticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylabel("test metric, mean and deviation over seeds")


def _boxes(axes: Axes, rows: Iterable[Row], column: str, label: str, log: bool = False) -> None:
    groups = _by_method(rows)
    values = [[row[column] for row in group] for group in groups.values()]
    axes.boxplot(values, showfliers=False)
    for place, points in enumerate(values, start=1):
        axes.scatter([place] * len(points), points, s=14, alpha=0.5, color="tab:blue", zorder=3)
        # A study's rows come best first.
        axes.scatter(place, points[0], s=110, marker="*", color="tab:red", zorder=4)
    axes.set_xticks(range(1, len(groups) + 1), list(groups))
    axes.set_ylabel(f"{label}, best trials")
    if log:
        axes.set_yscale("log")


def _stacks(axes: Axes, rows: tuple[Row, ...]) -> None:
    names, bottom = [row["method"] for row in rows], [0.0] * len(rows)
    estimated = any(row["estimated"] for row in rows)
    for part in ("computation", "compression", "communication"):
        heights = [1000 * row[part] for row in rows]
        label = f"{part}, estimated" if part == "communication" and estimated else part
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_ylabel("milliseconds per step and worker")


def _curves(axes: Axes, rows: tuple[Row, ...], metric: str) -> None:
    for method, points in _by_method(rows).items():
        axes.plot([p["epoch"] for p in points], [p["metric"] for p in points], label=method)
    axes.set(xlabel="epoch", ylabel=f"{metric}, best trial")
    _log_if_wide(axes, [p["metric"] for p in rows])


def _bars(axes: Axes, rows: tuple[Row, ...]) -> None:
    methods = list(_by_method(rows))
    parameters = sorted({row["parameter"] for row in rows})
    known = {(row["method"], row["parameter"]): row["importance"] for row in rows}
    width = 0.8 / len(parameters)
    for i, parameter in enumerate(parameters):
        heights = [known.get((method, parameter), 0.0) for method in methods]
        places = [place + (i - (len(parameters) - 1) / 2) * width for place in range(len(methods))]
        axes.bar(places, heights, width, label=parameter)
    axes.set_xticks(range(len(methods)), methods)
    axes.set_ylabel("importance (PED-ANOVA)")


def _log_if_wide(axes: Axes, values: list[Any]) -> None:
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
