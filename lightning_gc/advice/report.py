"""Report an advice: predicted and measured seconds, the verdict, the timeline's plot, files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_gc.advice.description import PLAIN
from lightning_gc.advice.prediction import Prediction, shortlist
from lightning_gc.controllers import Plan
from lightning_gc.core.registry import given_fields, path_of
from lightning_gc.exchange.timeline import Timeline
from lightning_gc.methods import plot_style
from lightning_gc.methods.catalogue import needs_no_tuning, to_tune
from lightning_gc.methods.method import Method
from lightning_gc.transports.accounting import human_bytes
from lightning_gc.transports.link import Links

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCAL_SHOWN = 2
"""Rows of local steps in the table."""
LOCAL_NOTE = (
    'Rows with "every" are local steps, which change the algorithm. They are never suggested.'
)


def table(
    rows: Sequence[Prediction], measured: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells: measured rows, then the best other row of every method.

    Speed compares a row's seconds with plain DDP's, both measured or both predicted.

    Args:
        rows: predicted ones, shortest step first.
        measured: name -> ``seconds``, ``low``, ``high`` and ``bytes``; empty if nothing was.
    """
    dense, hook = plain_rows(rows)
    known = {row.method for row in rows if row.name in measured}
    others = [row for row in shortlist(rows, len(rows)) if row.method not in known]
    if dense.name not in measured:
        others = sorted([*others, dense, hook], key=lambda row: row.seconds)
    by_method = {row.method: row for row in reversed(rows) if row.every > 1}
    local = sorted(by_method.values(), key=lambda row: row.seconds)[:LOCAL_SHOWN]
    predicted = {row.name: row.seconds for row in rows}
    written: Callable[[float], str] = "{:.4f}".format if measured else rough
    cells = []
    for name, seen in sorted(measured.items(), key=lambda item: float(item[1]["seconds"])):
        spread = f"{seen['seconds']:.4f} ({seen['low']:.4f}-{seen['high']:.4f})"
        speed = f"{measured[dense.name]['seconds'] / seen['seconds']:.2f}"
        foretold = f"{predicted[name]:.4f}" if name in predicted else ""  # not for torch's hook
        cells.append([name, spread, speed, human_bytes(seen["bytes"]), foretold])
    for row in (*others, *local):
        speed = f"{dense.seconds / row.seconds:.2f}"
        cells.append([row.name, "", speed, human_bytes(row.nbytes), written(row.seconds)])
    columns = ["method", "s per step", "speed relative to DDP", "bytes per step", "s predicted"]
    if not measured:
        columns = [columns[0], columns[4], *columns[2:4]]
        cells = [[name, seconds, speed, nbytes] for name, _, speed, nbytes, seconds in cells]
    return columns, cells


def plain_rows(rows: Sequence[Prediction]) -> tuple[Prediction, Prediction]:
    """Return the rows of plain DDP and of torch's 16-bit hook, with DDP's own buckets."""
    ours = [r for r in rows if (r.method, r.bucket_cap_mb, r.every) == (None, None, 1)]
    dense, hook = sorted(ours, key=lambda row: row.name != PLAIN)
    return dense, hook


def link_line(links: Links) -> str:
    """Return the fitted link in words."""
    parts = []
    for kind, word in (
        ("Mean", "all-reduce"),
        ("Gather", "all-gather"),
        ("Exchange", "all-to-all"),
    ):
        one = links[kind]
        knee = f", {one.knee_bytes / 1024:,.0f} KiB at once" if one.knee_bytes else ""
        down = "" if one.down_gbps is None else f" up, {one.down_gbps:.3g} Gbit/s down"
        rate = f"{one.gbps:.3g} Gbit/s{down}"
        parts.append(f"{word} {rate}, {one.latency_us:,.0f} µs a message{knee}")
    return "; ".join(parts)


def tuning(method: Method) -> str:
    """Return a sentence that says what to tune again with a method."""
    return f"To tune again: {to_tune(method.compressor_class) or 'the learning rate'}."


def keeps_settings(methods: Mapping[str, Method], row: Prediction) -> bool:
    """Return whether a row's method needs no hyper-parameters but dense training's."""
    method = methods.get(row.method or "")
    return method is not None and needs_no_tuning(method.compressor_class)


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


def _as_yaml(value: Any) -> Any:
    """Return an object in LightningCLI's format: its class and the given arguments."""
    if isinstance(value, tuple | list):
        return [_as_yaml(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_yaml(each) for name, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    fields = {name: _as_yaml(each) for name, each in given_fields(value).items()}
    if isinstance(value, Plan):
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


def rough(number: float) -> str:
    """Return two significant digits, as a prediction has."""
    return f"{float(f'{number:.2g}'):g}"


def judge(
    rows: Measured,
    dense: str,
    sixteen: str,
    limit: float,
    written: Callable[[float], str] = "{:.4f} s".format,
    hook: str = "",
) -> Verdict:
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
        written: writes seconds, as exactly as they are known.
        hook: name of the row of torch's 16-bit hook, which is never the choice; empty: none.
    """
    plain = rows[dense]["seconds"]
    others = {name: row for name, row in rows.items() if name not in (dense, hook)}
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
    took = f"{written(rows[best]['seconds'])} a step against {written(plain)}"
    if gain < LEAST_GAIN:
        room = (
            f"without any exchange a step takes {written(limit)} of plain DDP's "
            f"{written(plain)}, so no method could gain more than {max(1 - limit / plain, 0):.0%}"
            if 1 - limit / plain < 2 * LEAST_GAIN
            else f"the best method, {best}, takes {took}, {_words(gain)}"
        )
        # Noise could hide a difference of this size, so the verdict is not certain.
        hidden = rows[dense]["high"] / rows[dense]["low"] - 1 > 4 * LEAST_GAIN
        if hidden and gain > -LEAST_GAIN:
            return Verdict(None, _noise(best, dense, rows), False)
        return Verdict(None, f"{room}.", True)
    if not _faster(rows[best], rows[dense], LEAST_GAIN):
        return Verdict(None, _noise(best, dense, rows), False)
    tie = f" {fastest} is as fast and sends less." if best not in (fastest, sixteen) else ""
    if hook in rows:
        half = f"{written(rows[hook]['seconds'])} with {hook}"
        tie = f" It is {half}, {_words(_gain(rows[best], rows[hook]))}.{tie}"
    return Verdict(best, f"{took} with plain DDP, {_words(gain)}.{tie}", True)


def _gain(row: Mapping[str, Any], dense: Mapping[str, Any]) -> float:
    return 1 - float(row["seconds"]) / float(dense["seconds"])


def _faster(row: Mapping[str, Any], other: Mapping[str, Any], gain: float) -> bool:
    """Return whether a row is shorter by this gain, and the quartiles do not overlap."""
    return _gain(row, other) >= gain and bool(row["high"] < other["low"])


def _noise(best: str, dense: str, rows: Measured) -> str:
    one, other = (
        f"{rows[name]['seconds']:.4f} s ({rows[name]['low']:.4f}-{rows[name]['high']:.4f}) with "
        f"{name}"
        for name in (best, dense)
    )
    return (
        f"too noisy to tell. A step takes {one} and {other}. Measure again on an idle machine, or "
        f"with a larger --budget-seconds."
    )


def _words(gain: float) -> str:
    return f"{gain:.0%} shorter" if gain >= 0 else f"{-gain:.0%} longer"
