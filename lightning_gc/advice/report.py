"""Report an advice: predicted and measured seconds, the verdict, the timeline's plot, files."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_gc.advice.alpha_beta import HasSeconds
from lightning_gc.advice.prediction import Prediction
from lightning_gc.advice.timeline import Timeline
from lightning_gc.controllers import BySize, Plan
from lightning_gc.core import plot_style
from lightning_gc.core.registry import given_fields, path_of
from lightning_gc.methods.method import Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("", "s predicted", "s measured", "predicted / measured", "bytes per step", "error bound")
LOCAL = "another algorithm"


def cells(
    rows: Sequence[Prediction],
    measured: Mapping[str, Mapping[str, Any]],
    declared: Mapping[str, str],
) -> list[list[str]]:
    """Return the table's cells, row by row.

    Args:
        rows: predicted ones.
        measured: name -> ``seconds``, ``low`` and ``high``.
        declared: method -> its error bound in words.
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


def strategy_section(row: Prediction, method: Method, settings: Mapping[str, Any]) -> Any:
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


def plan_of(row: Prediction, method: Method) -> Plan:
    """Return a controller that sends the row's ``whole`` parameters uncompressed."""
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
    """Write all figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _as_yaml(value: Any) -> Any:
    """Return an object in LightningCLI's format: its class and the given arguments."""
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


_PHASES = {"compute": "compression", "communicate": "communication"}


def plot(path: Path, steps: Mapping[str, Timeline], limit: float) -> None:
    """Draw timelines as one SVG, one below the other.

    Args:
        path: of the file.
        steps: title -> timeline.
        limit: seconds of a step without a network, drawn as a line.

    Raises:
        ImportError: without matplotlib.
    """

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(plot_style.WIDTH, 1.5 * len(steps) + 1.2)
        grid = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (title, step) in zip(grid, steps.items(), strict=True):
            for span in step.spans:
                what = _PHASES.get(span.what, span.what)
                place = 1 if span.lane == "module" else 0
                axes.broken_barh(
                    [(span.start * 1e3, (span.stop - span.start) * 1e3)],
                    (place - 0.4, 0.8),
                    facecolors=plot_style.PHASES[what],
                    label=what,
                )
            axes.axvline(limit * 1e3, color=plot_style.INK, ls="--", lw=0.8, label="no network")
            axes.set_yticks([0, 1], ["exchange", "module"])
            axes.set_title(f"{title}: {step.seconds * 1e3:.1f} ms predicted")
        grid[-1].set_xlabel("milliseconds")
        plot_style.legend(figure)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plot_style.svg(draw, "timeline"))


LEAST_GAIN = 0.05
"""Minimum relative gain over plain DDP; methods that differ by less count as equally fast."""
LEAST_GAIN_OVER_16_BITS = 0.10
"""Minimum relative gain over 16 bits, which need no tuning."""

Measured = Mapping[str, Mapping[str, Any]]
"""Name -> ``seconds``, the median, the quartiles ``low`` and ``high``, and ``bytes`` of a step."""


@dataclass(frozen=True)
class Verdict:
    """The recommendation.

    Attributes:
        choice: name of a measured row; None means "do nothing", or no verdict if not ``certain``.
        reason: one sentence.
        certain: the quartiles of the deciding rows do not overlap.
    """

    choice: str | None
    reason: str
    certain: bool

    def __str__(self) -> str:
        """Return the verdict as the command prints it."""
        if self.choice is not None:
            return f"Use {self.choice}: {self.reason}"
        return f"Do nothing: {self.reason}" if self.certain else f"No verdict: {self.reason}"


def judge(rows: Measured, dense: str, sixteen: str, limit: float) -> Verdict:
    """Return the verdict on measured rows.

    A method is suggested if its median is at least 5 % shorter than plain DDP's and its upper
    quartile is below DDP's lower quartile. 16 bits are preferred unless a method is at least 10 %
    shorter, and its quartiles do not overlap theirs. Among methods less than 5 % apart, the one
    with most bytes is chosen: it changes gradients least, and noise does not decide.

    Args:
        rows: the measured rows.
        dense: name of plain DDP's row.
        sixteen: name of the row of 16 bits.
        limit: seconds of a step without exchange.
    """
    plain = rows[dense]["seconds"]
    others = {name: row for name, row in rows.items() if name != dense}
    best = fastest = min(others, key=lambda name: float(others[name]["seconds"]))
    over: list[tuple[str, float]] = [(dense, LEAST_GAIN)]  # rows that a suggestion must beat
    if sixteen in rows and _gain(rows[sixteen], rows[dense]) >= LEAST_GAIN:
        over.append((sixteen, LEAST_GAIN_OVER_16_BITS))
    worthy = [n for n in others if all(_faster(rows[n], rows[o], gain) for o, gain in over)]
    if worthy:
        fastest = min(worthy, key=lambda name: float(others[name]["seconds"]))
        near = [n for n in worthy if _gain(rows[fastest], rows[n]) < LEAST_GAIN]
        best = max(near, key=lambda name: float(rows[name]["bytes"]))
    elif len(over) > 1:
        best = sixteen
    gain = _gain(rows[best], rows[dense])
    took = f"{rows[best]['seconds']:.4f} s a step against {plain:.4f} s"
    if gain < LEAST_GAIN:
        room = (
            f"without any exchange a step takes {limit:.4f} s of plain DDP's {plain:.4f} s, so "
            f"no method could gain more than {max(1 - limit / plain, 0):.0%}"
            if 1 - limit / plain < 2 * LEAST_GAIN
            else f"the best method, {best}, takes {took}, {_words(gain)}"
        )
        # Noise could hide a difference of this size, so the verdict is not certain.
        hidden = rows[dense]["high"] / rows[dense]["low"] - 1 > 4 * LEAST_GAIN
        if hidden and gain > -LEAST_GAIN:
            return Verdict(None, f"{_noise(best, dense, rows)}; {room}.", False)
        return Verdict(None, f"{room}.", True)
    if not _faster(rows[best], rows[dense], LEAST_GAIN):
        return Verdict(None, f"{_noise(best, dense, rows)}, though {best} took {took}.", False)
    tie = f"; {fastest} is as fast, and sends less" if best not in (fastest, sixteen) else ""
    return Verdict(best, f"{took} with plain DDP, {_words(gain)}{tie}.", True)


def _gain(row: Mapping[str, Any], dense: Mapping[str, Any]) -> float:
    return 1 - float(row["seconds"]) / float(dense["seconds"])


def _faster(row: Mapping[str, Any], other: Mapping[str, Any], gain: float) -> bool:
    """Return whether a row is shorter by this gain, and the quartiles do not overlap."""
    return _gain(row, other) >= gain and bool(row["high"] < other["low"])


def _noise(best: str, dense: str, rows: Measured) -> str:
    one, other = rows[best], rows[dense]
    return (
        f"quartiles overlap or are wide, {one['low']:.4f} to {one['high']:.4f} s with {best} and "
        f"{other['low']:.4f} to {other['high']:.4f} s with {dense}: other load, or no difference; "
        f"measure again on an idle machine, or with a larger --budget-seconds"
    )


def _words(gain: float) -> str:
    return f"{gain:.0%} shorter" if gain >= 0 else f"{-gain:.0%} longer"
