"""Page and plot of the comparison at equal budgets: what wins at each ratio, the front, ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from equal_budgets_methods import DENSE, METHODS
from equal_budgets_models import MODELS
from equal_budgets_points import (
    ANY,
    BEST,
    TARGETS,
    Point,
    compare,
    entries,
    front,
    label,
    mean_ranks,
    point,
    points,
    trained,
)
from equal_budgets_table import html
from frame import Claim, Row, spread, table, where
from matplotlib.figure import Figure

from lightning_gc.methods import plot_style
from lightning_gc.methods.method import PREFIX

SHOWN = 8  # names in a sentence
NAMED = ("model", "method", "draw", "seed")  # of a run that ended in an error


def missing(rows: Sequence[Row], model: str, target: int) -> list[str]:
    """Return the methods of which a winner's runs, for a ratio or less, are not all there."""
    winners, targets = where(rows, model=model, draw=BEST), [t for t in TARGETS if t <= target]
    wanted = {(row["seed"], t) for row in winners for t in targets}
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in METHODS}
    for row in winners:
        found[row["method"]].add((row["seed"], row["target"]))
    return [name for name, there in found.items() if not wanted or not wanted <= there]


def sentence(rows: Sequence[Row], model: str, target: int) -> str:
    """Say which method wins on a model at a ratio, and which ones it is not told apart from."""
    start = f"**{target}x, {model}:** "
    if absent := missing(rows, model, target):
        return f"{start}not run ({len(absent)} of {len(METHODS)} methods are missing)."
    found, dense = entries(rows, model, target), point(rows, model, DENSE, ANY)
    if not found or not math.isfinite(found[0].loss):
        return f"{start}no method reaches it."
    best, others = found[0], found[1:]
    assert dense is not None  # it is not missing
    text = f"{start}`{best.method}` has the lowest loss, {shown(best)} at {best.ratio:,.0f}x"
    if best.method != DENSE:
        text += f"; dense has {shown(dense)}{compared(best, dense)}"
    close = [p.method for p in others if compare(best, p) != "agrees"]
    text += f". Of {len(others)} other methods that reach the ratio, "
    if not others:
        return f"{text.rpartition('. Of')[0]}. No other method reaches the ratio."
    if not close:
        return f"{text}it is told apart from all."
    more = f" and {len(close) - SHOWN} more" if len(close) > SHOWN else ""
    return f"{text}it is not told apart from {', '.join(map(code, close[:SHOWN]))}{more}."


def compared(one: Point, dense: Point) -> str:
    """Return what three seeds say of a point and dense, as a clause."""
    said = {"agrees": "is more", "disagrees": "is less"}.get(compare(one, dense))
    return f", which {said}" if said else ", and seeds do not tell them apart"


def code(name: str) -> str:
    """Return a name as Markdown shows code."""
    return f"`{name}`"


def shown(point: Point) -> str:
    """Return a point's loss over seeds."""
    return spread(list(point.losses.values()), ".3f")


def page(rows: list[Row]) -> str:
    """Return sentences, ranks, fronts and all losses."""
    text = "## What wins\n\nThe lowest mean of the seeds; *told apart* is a 95 % interval of the "
    text += "difference, paired by seed, on one side of zero. Each comparison is for itself: of "
    text += "twenty without an effect, one would be told apart; and what three seeds do not tell "
    text += "apart need not be equal. The lowest of many means is lower than its method deserves."
    text += "\n\n"
    text += "".join(f"- {sentence(rows, m, t)}\n" for t in TARGETS[1:] for m in MODELS)
    text += "\n## Ranks\n\nMean rank over the models, among the methods that reach a ratio on all "
    text += "of them (their number is in the heading), and a rough interval: where 95 % of the "
    text += "rankings lie whose seeds are drawn anew, with replacement. Few seeds make it too "
    text += "narrow, and it does not contain what other draws of the settings would change.\n\n"
    text += rank_table(rows)
    for name, model in MODELS.items():
        if found := points(rows, name):
            text += f"\n## {name}\n\n{model.about[0].upper()}{model.about[1:]}. The Pareto front: "
            text += f"no other winner has both less loss and fewer bytes.\n\n{front_table(found)}\n"
            text += f"All methods' winners, by ratio.\n\n{loss_table(rows, name)}"
    return text + untrained_table(rows) + errors(rows)


def rank_table(rows: Sequence[Row]) -> str:
    """Return the mean ranks of methods for each ratio."""
    columns = [
        {}
        if any(missing(rows, model, t) for model in MODELS)
        else mean_ranks([entries(rows, model, t) for model in MODELS])
        for t in TARGETS
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    lines = [[name, *(rank(column.get(name)) for column in columns)] for name in names]
    head = [f"{label(t)} ({len(column)})" for t, column in zip(TARGETS, columns, strict=True)]
    return table(["method", *head], lines) if lines else "Not run.\n"


def rank(found: tuple[float, float, float] | None) -> str:
    """Return a rank and its interval."""
    if found is None:
        return "–"
    mean, low, high = found
    return f"{mean:.1f}" + ("" if math.isnan(low) else f" ({low:.1f} to {high:.1f})")


def front_table(some: Sequence[Point]) -> str:
    """Return the Pareto front, most bytes first."""
    lines = [
        [f"`{p.method}`", f"{p.ratio:,.1f}", f"{p.bytes:,.0f}", shown(p), written(p)]
        for p in front(some)
    ]
    return table(["method", "ratio", "bytes per step", "loss", "settings"], lines)


def written(point: Point) -> str:
    """Return a point's settings, short; ``memory momentum`` is not the optimizer's."""
    parts = (
        f"{name.removeprefix(PREFIX).replace('.', ' ')} "
        + (f"{value:.3g}" if isinstance(value, float) else str(value))
        for name, value in point.settings.items()
    )
    return ", ".join(parts)


def loss_table(rows: Sequence[Row], model: str) -> str:
    """Return each method's loss for each ratio that it reaches, best first."""
    found = {t: {p.method: p for p in entries(rows, model, t)} for t in TARGETS}
    lines = [
        [name, *(shown(found[t][name]) if name in found[t] else "–" for t in TARGETS)]
        for name in found[TARGETS[0]]
    ]
    return table(["method", *map(label, TARGETS)], lines)


def untrained_table(rows: Sequence[Row]) -> str:
    """Return the methods of which some draws did not train, with the ratios of these draws."""
    lines, draws = [], [row for row in rows if row["draw"] != BEST]
    for name in METHODS:
        cells = [untrained(where(draws, model=model, method=name)) for model in MODELS]
        if any(cells):
            lines.append([name, *(cell or "–" for cell in cells)])
    text = "\n## What does not train\n\nDraws after which the training loss is no lower than that "
    text += "of a guess at equal odds, among all that were run, and how many times fewer bytes "
    text += "than dense they send.\n\n"
    return text + table(["method", *MODELS], lines) if lines else ""


def untrained(draws: Sequence[Row]) -> str:
    """Return how many draws did not train, and their ratios; nothing if all did."""
    lost = [row for row in draws if not trained(row)]
    ratios = sorted(row["ratio"] for row in lost if row["ratio"] is not None)
    sent = f": {', '.join(f'{ratio:,.1f}x' for ratio in ratios)}" if ratios else ""
    return f"{len(lost)} of {len(draws)}{sent}" if lost else ""


def errors(rows: Sequence[Row]) -> str:
    """Return the runs that ended in an error."""
    lines = [
        f"- {', '.join(f'{name} {row[name]}' for name in NAMED)}: {row['error']}\n"
        for row in rows
        if "error" in row
    ]
    return f"\n## Runs that ended in an error\n\n{''.join(lines)}" if lines else ""


def claims(rows: list[Row]) -> list[Claim]:
    """Return nothing: this is not held against a paper."""
    return []


def write_html(rows: list[Row], stem: Path) -> None:
    """Write the table that sorts and filters."""
    some = [p for model in MODELS for p in points(rows, model)]
    best = {id(p) for model in MODELS for p in front([p for p in some if p.model == model])}
    stem.with_suffix(".html").write_text(html(some, [id(p) in best for p in some], written))


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw a row per method and a panel per model: its loss at each ratio, and dense's loss.

    The rows are sorted by the highest ratio that a method reaches on a model, then by the losses
    at that ratio relative to dense.
    """
    run = [model for model in MODELS if points(rows, model)]
    at = {
        (model, target): {p.method: p for p in entries(rows, model, target)}
        for model in run
        for target in TARGETS[1:]
    }
    dense = {model: p.loss for model in run if (p := point(rows, model, DENSE, ANY))}

    def merit(method: str) -> tuple[int, float]:
        most = max(target for (_, target), found in at.items() if method in found)
        losses = [
            found[method].loss / dense.get(model, 1.0)
            for (model, target), found in at.items()
            if target == most and method in found
        ]
        return -most, statistics.fmean(losses)

    order = sorted({name for found in at.values() for name in found}, key=merit)
    if not order:
        return
    figure.set_size_inches(plot_style.WIDTH, 1.2 + 0.18 * len(order))
    panels = figure.subplots(1, len(run), sharey=True, squeeze=False)[0]
    kinds = {p.method: p.kind for found in at.values() for p in found.values()}
    for ax, model in zip(panels, run, strict=True):
        shown = []
        for target, mark in zip(TARGETS[1:], "osD^", strict=True):
            for place, method in enumerate(order):
                p = at[model, target].get(method)
                if p is not None and math.isfinite(p.loss):
                    shown.append(p.loss)
                    colour = plot_style.colour_of(kinds[method], method)
                    ax.plot(p.loss, place, mark, ms=4.5, mew=0.9, color=colour, mfc="none")
            ax.plot([], [], mark, color=plot_style.INK, mfc="none", label=label(target))
        if model in dense:
            ax.axvline(dense[model], color=plot_style.MUTED, lw=1, ls="--", label="dense")
        low, middle = min(shown), statistics.median(shown)
        # A few that learn nothing would flatten all others.
        ax.set_xlim(low - 0.1 * (middle - low), min(max(shown), middle + 2.5 * (middle - low)))
        ax.set_title(model, loc="center", fontweight="normal")
        ax.set_xlabel("loss")
        ax.margins(y=0.01)
    for kind, colour in plot_style.FAMILIES.items():
        if kind != "dense":
            panels[0].plot([], [], lw=4, color=colour, label=kind)
    panels[0].set_yticks(range(len(order)), order)
    panels[0].invert_yaxis()
    plot_style.legend(figure, 3)
