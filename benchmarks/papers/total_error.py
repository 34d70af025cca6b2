"""Which rule for the threshold has the least total error at equal density, and learns best?

    python benchmarks/papers/total_error.py --data DATA    # DATA/madelon is read

Paper 004 shows that a hard threshold has less total error than Top-k at equal volume, and leaves
open how to choose it. Here constants and courses in hindsight are bisected to Top-k's density, and
controllers that know only the past are held against them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import frame
import numpy as np
import tasks
from frame import Cell, Claim, Experiment, Row, interval, spread, table, values, verdict, where
from madelon_task import regression
from matplotlib.figure import Figure
from previous_budget import EvenBudget

from lightning_gc import HardThreshold, PerParameter, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import (
    Controller,
    Decision,
    Fixed,
    Needs,
    Observation,
    TotalError,
    TotalErrorBudget,
)
from lightning_gc.methods import plot_style

TOP, CONSTANT, ROOT_S, ROOT = "Top-k", "constant λ", "λ ∝ √s", "λ ∝ √(s/γ)"
BUDGET, EVEN, SIMPLE = "budget", "even budget", "simple λ"
ARMS = (TOP, CONSTANT, ROOT_S, ROOT, BUDGET, EVEN, SIMPLE)
MATCHED = ARMS[:6]  # the last chooses its density itself
PARTS, LEAST_RATE = 100, 0.02  # of the run; of the highest rate, in courses

# Density -> task; the shared settings of a task.
DENSITIES = {"words": (0.01, 0.001, 0.0003), "digits": (0.01, 0.003), "madelon": (0.01, 0.004)}
SETTINGS: dict[str, Cell] = {
    "words": {"rate": 10.0, "epochs": 3, "hidden": 128, "workers": 4, "columns": 32},
    "digits": {"rate": 0.05, "epochs": 12, "width": 16, "workers": 4, "batch": 16},
    "madelon": {"rate": 0.05, "epochs": 20, "workers": 4, "batch": 10},
}
QUALITY = {"words": "validation loss", "digits": "validation loss", "madelon": "training loss"}
ABOUT = f"""
Total error at equal density, error feedback on every tensor, 4 simulated workers. *words*: the
demo's language model (128 units, 3 epochs of Python's documentation, clipped, SGD whose rate falls
in a line to zero). *digits*: the ResNet of examples/vision.py (width 16, 12 epochs, momentum, rate
that climbs for 3 epochs and falls tenfold at 60 and 85 %). *madelon*: logistic regression,
standardised, constant rate.

`{CONSTANT}`, `{ROOT_S}` and `{ROOT}` are found in hindsight: γ is the rate, s the root mean square
of local gradients in Top-k's run, smoothed; their factor is bisected until the density is
Top-k's within 1 %. `{BUDGET}` is `TotalErrorBudget`, `{EVEN}` its rule before (a constant density),
both told Top-k's density. `{SIMPLE}` is `TotalError(k_min)`, which chooses its
density itself. Σγ²‖e‖² is in units of the update (paper 004, Remark 4 and its convergence bound),
Σ‖e‖² in those of the gradient; both as multiples of `{CONSTANT}`'s.

*Payload* is the bytes of worker 0's values and positions, as a multiple of Top-k's. A threshold's
message has up to 39 bytes more, and a Top-k's up to 23. *Apart* is the 95 % interval of the loss
less Top-k's (Student's t).
"""


@dataclasses.dataclass(frozen=True)
class Seen(Controller):
    """Does what another controller does, and keeps what both are told."""

    inner: Controller
    told: list[Observation] = dataclasses.field(default_factory=list, compare=False, repr=False)

    @property
    def needs(self) -> Needs:
        """Errors and the scale of gradients as well."""
        return self.inner.needs | Needs(errors=True, scale=True)

    def turns(self, epoch: int) -> int:
        """Return the other's turns, or some; none where it measures moments, one row an epoch."""
        return self.inner.turns(epoch) or (0 if self.inner.needs.moments else PARTS)

    def init(self) -> Any:
        """Return the other's."""
        return self.inner.init()

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        """Decide as the other."""
        self.told.append(observation)
        return self.inner.decide(observation, state)


@dataclasses.dataclass(frozen=True)
class Course(Controller):
    """Thresholds of equal parts of the run."""

    levels: tuple[float, ...]

    def turns(self, epoch: int) -> int:
        """Return the number of parts."""
        return len(self.levels)

    def init(self) -> Any:
        """Return nothing."""
        return {}

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        """Return the threshold of the part that begins."""
        part = int((observation.progress or 0.0) * len(self.levels) + 1e-9)
        return Decision(self.levels[min(part, len(self.levels) - 1)]), state


def trained(cell: Cell, compressor: Compressor, controller: Controller, data: Path | None) -> Row:
    """Train; return figures with what was seen on the way."""
    seen = Seen(controller)
    method = tasks.Method(PerParameter(compressor), controller=seen)
    if cell["task"] == "madelon":
        assert data is not None
        row = regression(cell, method, data / "madelon")
    else:
        row = (tasks.words if cell["task"] == "words" else tasks.photos)(cell, method)
    parts = [(o.progress or 0.0, o) for o in seen.told if o.steps]
    shares = np.diff([0.0, *(progress for progress, _ in parts)])
    for name, figure in (("scales", "gradient_scale"), ("sent", "density")):
        row[name] = _even(shares, [getattr(o, figure) for _, o in parts])
    row["rates"] = _even(shares, [o.learning_rate for _, o in parts])
    row["errors"] = _even(shares, [o.total_error_update for _, o in parts])
    return row


def _even(shares: np.ndarray, figures: Sequence[float]) -> list[float]:
    """Return figures of stretches at the middles of equal parts of the run."""
    at = (np.arange(PARTS) + 0.5) / PARTS
    index = np.minimum(np.searchsorted(np.cumsum(shares), at), len(figures) - 1)
    return [float(f"{figures[i]:.5g}") for i in index]


@functools.lru_cache(maxsize=4)
def reference(task: str, density: float, seed: int, given: tuple[Any, ...], data: Any) -> Row:
    """Return Top-k's run, whose density the others are to have."""
    cell = dict(given) | {"task": task, "seed": seed}
    return trained(cell, TopK(density), Fixed(density), data)


def course(arm: str, top: Row) -> list[float]:
    """Return λ in equal parts of the run, but for a factor."""
    scales, rates = np.array(top["scales"]), np.array(top["rates"])
    smooth = np.exp(np.convolve(np.log(np.pad(scales, 4, "edge")), np.ones(9) / 9, "valid"))
    if arm == CONSTANT:
        return [1.0] * PARTS
    slow = np.maximum(rates, LEAST_RATE * rates.max()) if arm == ROOT else 1.0
    return [float(value) for value in np.sqrt(smooth / slow)]


def matched(
    run: Callable[[float], Row],
    factor: float,
    target: float,
    figure: str = "density",
    slope: float = -1.5,
) -> Row:
    """Return the run whose figure is the target's within 1 %, by secants in logarithms.

    Args:
        run: trains with a factor.
        factor: to begin with.
        target: what the figure is to be.
        figure: of the row.
        slope: of its logarithm over the factor's, until two runs tell.
    """
    tried: list[tuple[float, float, Row]] = []
    for _ in range(7):
        row = run(factor)
        off = math.log(max(row[figure], 1e-9) / target)
        tried.append((math.log(factor), off, row))
        if abs(off) < 0.01:
            break
        (x, y, _), *others = sorted(tried, key=lambda point: abs(point[1]))
        seen = (y - others[0][1]) / (x - others[0][0]) if others and x != others[0][0] else slope
        steep = min(max(seen / math.copysign(1.0, slope), 0.4), 4.0)
        factor = math.exp(x - y / math.copysign(steep, slope))
    best = min(tried, key=lambda point: abs(point[1]))
    return {**best[2], "tries": len(tried), "factor": math.exp(best[0])}


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell: one run, or several until the density is right."""
    arm, aim, task, seed = (cell[name] for name in ("arm", "aim", "task", "seed"))
    given = tuple((n, v) for n, v in cell.items() if n not in ("arm", "aim", "task", "seed"))
    top = reference(task, aim, seed, given, data)
    if arm == TOP:
        return top
    target = top["density"]
    controllers: dict[str, Callable[[], Controller]] = {
        BUDGET: lambda: TotalErrorBudget(target),
        EVEN: lambda: EvenBudget(target),
        SIMPLE: lambda: TotalError(aim),
    }
    if arm in controllers:
        return trained(cell, HardThreshold(), controllers[arm](), data)
    shape = course(arm, top)
    walk = statistics.fmean((s / v) ** 2 for s, v in zip(top["scales"], shape, strict=True))

    def run(factor: float) -> Row:
        levels = tuple(factor * value for value in shape)
        return trained(cell, HardThreshold(), Course(levels), data)

    return matched(run, math.sqrt(walk / target), target)


def cells(seeds: int) -> list[Cell]:
    """Return all tasks, densities and arms."""
    return [
        {"task": task, "aim": aim, "arm": arm, **SETTINGS[task], "seed": seed}
        for seed in range(seeds)
        for task, densities in DENSITIES.items()
        for aim in densities
        for arm in ARMS
    ]


def paired(
    rows: list[Row], arm: str, other: str, figure: str, **what: Any
) -> tuple[list[float], list[float]]:
    """Return a figure of two arms in the same task, density and seed."""
    keys = ("task", "aim", "seed")
    theirs = {tuple(r[k] for k in keys): r for r in where(rows, arm=other, **what)}
    mine = [r for r in where(rows, arm=arm, **what) if tuple(r[k] for k in keys) in theirs]
    others = [theirs[tuple(r[k] for k in keys)] for r in mine]
    return values(mine, figure), values(others, figure)


def ratio(rows: list[Row], arm: str, other: str, figure: str, **what: Any) -> list[float]:
    """Return the quotients of two arms."""
    return [a / b for a, b in zip(*paired(rows, arm, other, figure, **what), strict=True)]


def page(rows: list[Row]) -> str:
    """Return a table per task and density, and one over all."""
    text = ""
    for task, densities in DENSITIES.items():
        for aim in densities:
            what = {"task": task, "aim": aim}
            if not where(rows, **what):
                continue
            lines = []
            for arm in ARMS:
                mine = where(rows, arm=arm, **what)
                ours, theirs = paired(rows, arm, TOP, "loss", **what)
                apart = [a - b for a, b in zip(ours, theirs, strict=True)] if arm != TOP else []
                lines.append(
                    [
                        f"`{arm}`",
                        spread(values(mine, "density"), ".3f", 100) + " %",
                        spread(ratio(rows, arm, CONSTANT, "total_error", **what)),
                        spread(ratio(rows, arm, CONSTANT, "total_error_update", **what)),
                        spread(ratio(rows, arm, TOP, "bits", **what)),
                        spread(values(mine, "loss"), ".4f"),
                        "{:+.3f} to {:+.3f}".format(*interval(apart)) if len(apart) > 1 else "",
                    ]
                )
            head = ["", "density", "Σ‖e‖²", "Σγ²‖e‖²", "payload", QUALITY[task], "apart"]
            text += f"## {task}, {100 * aim:g} %\n\n{table(head, lines)}\n"
    lines = []
    for arm in MATCHED:
        others = [ratio(rows, arm, other, "total_error_update") for other in (CONSTANT, ROOT, TOP)]
        means = [math.exp(statistics.fmean(map(math.log, r))) if r else math.nan for r in others]
        worst = [max(r, default=math.nan) for r in others]
        shown = [f"{mean:.2f} ({most:.2f})" for mean, most in zip(means, worst, strict=True)]
        budget = ratio(rows, arm, TOP, "density") or [math.nan]
        lines.append([f"`{arm}`", *shown, f"{min(budget):.3f} to {max(budget):.3f}"])
    head = ["Σγ²‖e‖² of", f"over `{CONSTANT}`'s", f"over `{ROOT}`'s", "over Top-k's", "density"]
    return f"{text}## All tasks\n\nGeometric mean, and the worst.\n\n{table(head, lines)}\n"


def claims(rows: list[Row]) -> list[Claim]:
    """Return what the paper says of thresholds at equal volume."""
    found = []
    for text, figure in (
        (
            "a hard threshold has less total error than Top-k at equal density (Fig. 1c, 3)",
            "total_error",
        ),
        ("the same in units of the update", "total_error_update"),
        ("and reaches a better model (Fig. 3: 93.9 against 91.1 % at 0.06 %)", "loss"),
    ):
        ours, theirs = paired(rows, CONSTANT, TOP, figure)
        shown = f"{spread(ratio(rows, CONSTANT, TOP, figure))} of Top-k's over {len(ours)} pairs"
        logs = [[math.log(v) for v in pair] for pair in (ours, theirs)]
        found.append(Claim(text, "", shown, verdict(*logs)))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw density and total error over the run, of the first seed of the language model."""
    figure.set_size_inches(plot_style.WIDTH, 5.6)
    above, below = figure.subplots(2, sharex=True)
    looks = zip(plot_style.SERIES, ("-", "--", "-.", ":"), strict=False)
    for arm, (colour, dashes) in zip(MATCHED, looks, strict=False):
        for row in where(rows, arm=arm, task="words", aim=0.001, seed=0):
            at = (np.arange(PARTS) + 0.5) / PARTS
            above.plot(at, 100 * np.asarray(row["sent"]), dashes, color=colour, label=arm)
            below.plot(at, row["errors"], dashes, color=colour)
    above.set_title("Density, % of the elements")
    plot_style.plain_log(above.yaxis)
    below.set_title("Total error: Σγ²‖e‖² so far")
    below.set(xlabel="share of the run")
    plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(
        frame.main(
            Experiment(
                "total_error",
                ABOUT,
                cells,
                train,
                page,
                claims,
                draw,
                data="a folder",
                free=frozenset({"words", "digits"}),
            )
        )
    )
