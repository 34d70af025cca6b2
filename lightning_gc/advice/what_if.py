"""Predict what compression would gain for a model, link and workers that are only described.

Nothing is measured. The prediction is the one of ``advise``. It takes the methods' seconds and
bytes from ``shipped_costs.json``, which ``benchmarks/shipped_costs.py`` measured on one machine.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from lightning_gc.advice import prediction, report
from lightning_gc.advice.costs import bucket_trace, simulated
from lightning_gc.advice.description import LEFT_OUT, Description, Shapes, candidates
from lightning_gc.advice.traces import Asked, Trace, pattern
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.controllers.auto import MANY
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange.timeline import Module
from lightning_gc.methods.catalogue import start_text
from lightning_gc.methods.method import Method, parse_method
from lightning_gc.methods.text_table import plain
from lightning_gc.transports.link import NOMINAL, alike

FORWARD = 1 / 3
"""Share of the forward pass in a step. The backward pass computes two products for each of its."""
QUICK = 1e9
"""Parameters in a second of a step above which it is a GPU's: 24 bytes of each are read or written
at least, by which one core of a CPU is busy for longer."""
MARGIN = 1.5
"""Factor by which a predicted speed may be off.

Measured with two workers on two cores: 1.02 in the median, 1.21 at worst. With more workers than
cores it was 1.47 at worst (``benchmarks/results/shipped_costs_20261126.md``).
"""


@functools.cache
def shipped() -> Any:
    """Return the shipped costs, as ``benchmarks/shipped_costs.py`` writes them."""
    file = resources.files("lightning_gc.advice").joinpath("shipped_costs.json")
    return json.loads(file.read_text())


def shipped_trace(name: str, method: Method | None, shapes: Shapes, workers: int) -> Trace:
    """Return a step of one segment, as ``costs.segment_trace`` measures it.

    Seconds and bytes are interpolated between the measured numbers of elements. Bytes of a low-rank
    method depend on the sides of its matrices instead.

    Args:
        name: of the method in the shipped costs.
        method: None sends everything uncompressed.
        shapes: of the parameters.
        workers: W.
    """
    compressor = None if method is None else by_default(method.make_compressor({}))
    taken = [s for s in shapes.values() if compressor is None or compressor.compresses(s)]
    numel = sum(map(math.prod, taken))
    left = sum(map(math.prod, shapes.values())) - numel
    parts = []
    if numel:
        low_rank = compressor is not None and compressor.traits.kind == "low rank"
        sides = sum(shape[0] + math.prod(shape[1:]) for shape in taken) if low_rank else None
        parts.append(_any_workers(name, numel, sides, workers))
    if left:
        parts.append(_any_workers(prediction.WHOLE, left, None, workers))
    return bucket_trace(parts)


def _any_workers(name: str, numel: int, sides: int | None, workers: int) -> Trace:
    seen = [_interpolated(name, numel, sides, few) for few in simulated(workers)]
    return seen[0] if len(seen) == 1 else pattern(seen).at(workers)


def _interpolated(name: str, numel: int, sides: int | None, workers: int) -> Trace:
    """Return the trace of one square matrix with this many elements, or with these sides."""
    sizes: list[int] = shipped()["sizes"]
    known = shipped()["methods"][name][str(workers)]
    grid = [float(size) for size in sizes]
    by_sides = [2 * math.sqrt(size) for size in sizes]
    seconds = tuple(
        _between(numel, grid, column, beyond=True)
        for column in zip(*(each["seconds"] for each in known), strict=True)
    )
    asked = []
    for number, (kind, _, collectives, lengths) in enumerate(known[0]["asked"]):
        column = [each["asked"][number][1] for each in known]
        place = (numel, grid) if sides is None else (sides, by_sides)
        asked.append(Asked(kind, _between(*place, column, beyond=False), collectives, lengths))
    return Trace(workers, tuple(asked), seconds)


def _between(x: float, grid: Sequence[float], values: Sequence[float], beyond: bool) -> float:
    """Interpolate linearly. Above the grid values are proportional to x.

    Args:
        x: where.
        grid: ascending.
        values: at the grid.
        beyond: keep the first value below the grid, as for seconds; otherwise it is proportional.
    """
    if x > grid[-1]:
        return values[-1] * x / grid[-1]
    if x < grid[0] and not beyond:
        return values[0] * x / grid[0]
    return float(np.interp(x, grid, values))


@dataclass(frozen=True)
class WhatIf(Description):
    """Predicts a described training from the shipped costs."""

    @property
    def methods(self) -> dict[str, Method]:
        """The methods whose costs are shipped."""
        names = [n for n in prediction.METHODS if not self.gpu or n in shipped()["gpu"]["step_ms"]]
        if missing := set(self.chosen).difference(names):
            refuse(f"{min(missing)}: it has no costs on a GPU. Choose from {', '.join(names)}")
        names = [name for name in names if name in (self.chosen or candidates(self.workers))]
        return {name: parse_method(name) for name in names}

    def situation(self) -> prediction.Situation:
        """Return what ``advise`` would have measured.

        Gradients become ready in proportion to their elements, the last parameter first. Each
        second of compression delays the backward pass by a second.
        """
        names = tuple(self.shapes)[::-1]
        nbytes = tuple(4 * math.prod(self.shapes[name]) for name in names)
        backward = (1 - FORWARD) * self.step
        done, ready = 0, []
        for each in nbytes:
            done += each
            ready.append(backward * done / sum(nbytes) if self.overlap else backward)
        pieces = prediction.pieces_for(nbytes)
        costs = {
            name: [
                self._cost(name, method, {names[i]: self.shapes[names[i]] for i in piece})
                for piece in pieces
            ]
            for name, method in {prediction.WHOLE: None, **self.methods}.items()
        }
        return prediction.Situation(
            Module(FORWARD * self.step, backward, 0.0),
            names,
            nbytes,
            tuple(ready),
            pieces,
            costs,
            prediction.WHOLE,
            self.workers,
            alike(self.link.times(NOMINAL)),
            contention=1.0,
            overhead=self._on_gpu("plain DDP", self.parameters, "no synchronisation"),
        )

    def _cost(self, name: str, method: Method | None, shapes: Shapes) -> Trace:
        found = shipped_trace(name, method, shapes, self.workers)
        if self.codec is None and not self.gpu:
            return found
        numel = sum(map(math.prod, shapes.values()))
        first = self._on_gpu(name, numel)
        if method is not None and self.codec is not None:
            first = self.codec * numel / self.parameters
        return replace(found, seconds=(first, *(0.0 for _ in found.asked)))

    def _on_gpu(self, name: str, numel: int, without: str = "plain DDP") -> float:
        """Return the seconds by which a step on the GPU is longer than another one."""
        if not self.gpu:
            return 0.0
        known = shipped()["gpu"]
        more = known["step_ms"][name] - known["step_ms"][without]
        share = numel / known["parameters"]
        return float(max(more, 0.0) * 1e-3 * share)

    @property
    def hint(self) -> str:
        """Sentences on a GPU's step where ``gpu`` is not set, and on what is left out."""
        fast = self.parameters / self.step > QUICK
        found = "" if self.gpu or not fast else " Such a step is a GPU's: give --gpu."
        return found + (f" {LEFT_OUT}" if self.workers > MANY and not self.chosen else "")

    def rows(self) -> list[prediction.Prediction]:
        """Return the predicted rows, shortest step first.

        Plans that leave some tensors uncompressed are not searched, because that takes seconds.
        """
        return prediction.predict(self.situation(), {})


def verdict(rows: Sequence[prediction.Prediction], step: float) -> tuple[str, str | None, float]:
    """Return the verdict as a text, the suggested method, and its speed relative to plain DDP.

    The rules are those of ``report.judge``. A speed below ``MARGIN`` is within the error of a
    prediction.

    Args:
        rows: predicted ones.
        step: seconds of a step without exchange.
    """
    dense, hook = report.plain_rows(rows)
    best = {row.name: row for row in (dense, hook, *prediction.shortlist(rows, len(rows)))}
    seconds = ("seconds", "low", "high")
    measured = {
        name: dict.fromkeys(seconds, row.seconds) | {"bytes": row.nbytes}
        for name, row in best.items()
    }
    sixteen = next(
        (name for name, row in best.items() if row.method == prediction.SIXTEEN), prediction.SIXTEEN
    )
    found = report.judge(
        *(measured, dense.name, sixteen, step),
        written=lambda seconds: f"{report.rough(seconds)} s",
        hook=hook.name,
    )
    if found.choice is None:
        return str(found), None, 1.0
    chosen = best[found.choice]
    speed = dense.seconds / chosen.seconds
    if speed < MARGIN:
        return f"Too close to call. {found.choice}: {found.reason}", chosen.method, speed
    equal = [
        row.name
        for row in sorted(best.values(), key=lambda row: row.seconds)
        if row not in (chosen, hook) and 1 / MARGIN <= row.seconds / chosen.seconds <= MARGIN
    ]
    also = f" Equal within the prediction's error: {', '.join(equal)}." if equal else ""
    return f"{found}{also}", chosen.method, speed


def changes(case: WhatIf, method: str | None) -> list[str]:
    """Return a line for each thing that may differ from the description, and the answer then.

    Args:
        case: as described.
        method: the method that its verdict suggests, or None.
    """
    slow, fast = 10 * case.link.latency_us, case.link.times(10)
    twice = replace(case, workers=2 * case.workers)
    fewer = ", without sparsifiers" if len(twice.methods) < len(case.methods) else ""
    cases = {
        f"{slow:g} µs a message": replace(case, link=replace(case.link, latency_us=slow)),
        f"{twice.workers} workers{fewer}": twice,
        str(fast): replace(case, link=fast),
        "no overlap with the backward pass": replace(case, overlap=False),
    }
    lines = []
    for what, other in cases.items():
        _, then, speed = verdict(other.rows(), other.step)
        answer = f"{then}, {speed:.3g} times plain DDP's speed" if then else "do nothing"
        close = " (too close to call)" if then and speed < MARGIN else ""
        lines.append(f"  {what}: {'still ' if then == method else ''}{answer}{close}")
    return lines


def in_python(method: Method) -> str:
    """Return the strategy of a method of ``METHODS`` as one would write it.

    Example:
        >>> in_python(parse_method("topk:value_dtype=bfloat16,scheme=two_shot"))
        "CompressedDDPStrategy(TopK(value_dtype='bfloat16'), scheme='two_shot')"
    """
    fields = ", ".join(f"{name}={value!r}" for name, value in method.fixed.items())
    scheme = "" if method.scheme is None else f", scheme={method.scheme!r}"
    return f"CompressedDDPStrategy({method.compressor_class.__name__}({fields}){scheme})"


def run(described: Description, name: str | None) -> None:
    """Print the prediction for a described training; its model may have a name."""
    case = WhatIf(**vars(described))
    rows = case.rows()
    text, method, _ = verdict(rows, case.step)
    line = f"Prediction, nothing was measured.{case.hint} {text}"
    columns, cells = report.table(rows, {})
    model = name or f"{len(case.shapes)} equal square matrices"
    known = shipped()["gpu"] if case.gpu else shipped()
    lines = [
        line,
        "",
        plain(columns, cells, shutil.get_terminal_size((120, 24)).columns),
        report.LOCAL_NOTE,
        f"Model: {model}, {case.parameters:,} parameters in float32.",
        f"Network: {case.workers} workers, {case.link}, {case.link.latency_us:g} µs a message.",
        f"Costs of compression: {known['machine']}.",
        "Assumed: a third of the step is the forward pass, and gradients become ready evenly.",
        "Also assumed: compression delays the backward pass by its own seconds.",
    ]
    if case.gpu:
        lines.append("The GPU's costs are those of one worker. Decoding takes longer with more.")
    lines += [
        f"Methods within a factor of {MARGIN:g} count as equal. Accuracy is not predicted.",
        "",
        "What if:",
        *changes(case, method),
        "",
        *([] if method is None else [f"In Python: {in_python(case.methods[method])}"]),
        *([] if method is None else [report.tuning(case.methods[method])]),
        "",
        "Without a prediction, begin with one of these:",
        start_text(shutil.get_terminal_size((120, 24)).columns),
        "Next: measure your model on your machines, with lightning-gc advise train.yaml",
        line,
    ]
    sys.stdout.write("\n".join(lines) + "\n")
