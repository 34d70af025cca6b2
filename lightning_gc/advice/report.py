"""Report of an advice: table of predicted beside measured, plot of the timeline, files."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_gc.advice.alpha_beta import HasSeconds
from lightning_gc.advice.prediction import Row
from lightning_gc.advice.timeline import Timeline
from lightning_gc.controllers import BySize, Plan
from lightning_gc.registry import path_of
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.study_rules import given_fields

COLUMNS = ("", "s predicted", "s measured", "predicted / measured", "bytes per step", "error bound")
LOCAL = "another algorithm"


def cells(
    rows: Sequence[Row], measured: Mapping[str, Mapping[str, Any]], declared: Mapping[str, str]
) -> list[list[str]]:
    """Return the texts of each row.

    Args:
        rows: predicted ones.
        measured: name -> ``seconds``, ``low`` and ``high``.
        declared: method -> what it declares of its error.
    """
    found = []
    for row in rows:
        seen = measured.get(row.name)
        shown = [f"{seen['seconds']:.4f} ({seen['low']:.4f}-{seen['high']:.4f})"] if seen else [""]
        shown += [f"{row.seconds / seen['seconds']:.2f}"] if seen else [""]
        note = LOCAL if row.every > 1 else declared.get(row.method or "", "exact")
        found.append([row.name, f"{row.seconds:.4f}", *shown, f"{row.nbytes:,.0f}", note])
    return found


def link_line(link: HasSeconds) -> str:
    """Return the fitted link in words."""
    parts = []
    for kind, word in (
        ("Mean", "all-reduce"),
        ("Gather", "all-gather"),
        ("Exchange", "all-to-all"),
    ):
        one = link.of(kind)
        knee = f", {one.knee_bytes / 1024:,.0f} KiB at once" if one.knee_bytes else ""
        parts.append(f"{word} {one.gbps:.3g} Gbit/s, {one.latency_us:,.0f} µs a message{knee}")
    return "; ".join(parts)


def strategy_section(row: Row, method: Method, settings: Mapping[str, Any]) -> Any:
    """Return the file's ``trainer.strategy`` for a row.

    Args:
        row: what is suggested.
        method: its method.
        settings: further ones of DDP.
    """
    more = dict(settings)
    if row.bucket_cap_mb is not None:
        more["bucket_cap_mb"] = row.bucket_cap_mb
    compressor = method.make_compressor({})
    memory, scheme = method.memory_and_scheme()
    parts: dict[str, Any] = {"compressor": compressor, "memory": memory}
    if scheme is not None:
        parts["scheme"] = scheme
    controller = plan_of(row, method) if row.whole else method.controller
    if controller is not None:
        parts["controller"] = controller
    named = {name: _as_yaml(part) for name, part in parts.items()}
    return {"class_path": "lightning_gc.CompressedDDPStrategy", "init_args": named | more}


def plan_of(row: Row, method: Method) -> Plan:
    """Return the controller that sends a row's parameters whole, and others at the level."""
    return Plan(dict.fromkeys(row.whole), default=method.make_compressor({}).level)


def write_yaml(path: Path, sections: Mapping[str, Any], strategy: Any, trainer: Any) -> None:
    """Write the file's sections with another strategy.

    Args:
        path: of the file.
        sections: those that were read.
        strategy: its ``trainer.strategy``.
        trainer: other settings of the Trainer, such as ``devices``.
    """
    written = copy.deepcopy(dict(sections))
    written["trainer"] = {**(written.get("trainer") or {}), **trainer, "strategy": strategy}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write everything in figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _as_yaml(value: Any) -> Any:
    """Return an object as LightningCLI's files have it: its class and what was given."""
    if isinstance(value, tuple | list):
        return [_as_yaml(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_yaml(each) for name, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    fields = {name: _as_yaml(each) for name, each in given_fields(value).items()}
    if isinstance(value, Plan | BySize):
        fields["levels"] = dict(value.levels)
    return {"class_path": path_of(type(value)), **({"init_args": fields} if fields else {})}


_COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "optimizer": "tab:gray",
    "compute": "tab:orange",
    "communicate": "tab:red",
}


def plot(path: Path, steps: Mapping[str, Timeline]) -> None:
    """Draw timelines below one another, as SVG.

    Args:
        path: of the file.
        steps: title -> timeline.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(7.5, 1.6 * len(steps) + 0.6), layout="constrained")
    grid = figure.subplots(len(steps), 1, sharex=True, squeeze=False)
    for axes, (title, step) in zip(grid[:, 0], steps.items(), strict=True):
        for span in step.spans:
            place = 1 if span.lane == "module" else 0
            axes.broken_barh(
                [(span.start * 1e3, (span.stop - span.start) * 1e3)],
                (place - 0.4, 0.8),
                facecolors=_COLOURS[span.what],
                edgecolor="white",
                linewidth=0.4,
            )
        axes.set_yticks([0, 1], ["exchange", "module"])
        axes.set_title(f"{title}: {step.seconds * 1e3:.1f} ms predicted", fontsize="medium")
    grid[-1, 0].set_xlabel("milliseconds")
    handles = [Patch(color=colour, label=what) for what, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
