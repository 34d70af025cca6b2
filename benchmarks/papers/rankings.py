"""Every compressor at four learning rates: does total error tell quality, does tuning tell methods?

    python benchmarks/papers/rankings.py

Two questions that the papers leave. Paper 004 argues for sparsifiers that Σ‖e_t‖² tells how well
they train: does it order all compressors? The thesis tunes each method by itself: does that change
who is better, or only by how much?
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

from catalogue import compressor, is_direction  # isort: skip # the path is set by tasks
from lightning_gc import COMPRESSORS
from lightning_gc.engine.compatibility import combine
from lightning_gc.methods import plot_style

RATES = (40.0, 20.0, 10.0, 5.0)
# Of methods whose result is a direction: a rate is what one step moves each weight by.
DIRECTION_RATES = (0.01, 0.003, 0.001, 0.0003)
MEASURES = {
    "total_error": "Σ‖e‖², units of the gradient",
    "total_error_update": "Σγ²‖e‖², units of the update",
    "relative_error": "√(Σ‖e‖²/Σ‖x‖²)",
    "bytes": "bytes (fewer expected worse)",
}
# What the survey says of pairs: name, the one that it beats.
SAID = (
    ("natural_compression", "qsgd"),
    ("ecqsgd", "qsgd"),
    ("sidco", "redsync"),
    ("sidco", "gaussian_k"),
    ("sidco", "dgc"),
)
ABOUT = """
Two questions that the papers leave open. Does the total error predict quality over all compressors
(paper 004 argues it for sparsifiers)? And does tuning each method by itself, as the thesis does,
change rankings or only levels?

The demo's LSTM with 64 units, one epoch of Python's documentation (198 steps), two workers, every
compressor with its default memory and scheme, at four learning rates that fall in a straight line
to zero. *Loss* is the validation text's cross-entropy. e is what a step did not send, x − C(x),
with a memory or without. SignSGD and Signum return directions: their rates and errors are on
another scale, so they are left out of both questions. The lines on the thesis's figures were added
when the runs were there.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all compressors at all rates; all of one seed first."""
    return [
        {"name": name, "rate": rate, "seed": seed}
        | {"epochs": 1, "hidden": 64, "columns": 10, "workers": 2}
        for seed in range(seeds)
        for name in sorted(COMPRESSORS, key=lambda name: name != "identity")  # which all need
        for rate in (DIRECTION_RATES if is_direction(compressor(name)) else RATES)
    ]


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    method = compressor(cell["name"])
    clip = 0.0 if is_direction(method) else tasks.CLIP
    found = tasks.words({**cell, "clip": clip}, tasks.Method(method))
    _, memory, _ = combine(method)
    return found | {"kind": method.traits.kind, "feedback": memory.feeds_back}


def comparable(rows: list[Row]) -> list[Row]:
    """Return the runs whose rates mean the same, dense left in."""
    return [row for row in rows if row["rate"] in RATES and row["loss"] is not None]


def correlations(rows: list[Row], measure: str, **what: Any) -> list[float]:
    """Return Spearman's ρ between a measure and the loss, for each rate and seed."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        for rate in RATES:
            some = [
                r
                for r in where(comparable(rows), seed=seed, rate=rate, **what)
                if r["name"] != "identity" and r[measure] is not None
            ]
            if len(some) > 4:
                sign = -1 if measure == "bytes" else 1
                xs, ys = [sign * r[measure] for r in some], [r["loss"] for r in some]
                found.append(float(stats.spearmanr(xs, ys).statistic))
    return found


def loss(rows: list[Row], name: str, rate: float) -> float:
    """Return a method's mean loss over seeds at a rate; infinite if a run diverged."""
    return statistics.fmean(values(where(rows, name=name, rate=rate), "loss") or [math.inf])


def tuned(rows: list[Row]) -> dict[str, tuple[float, float, float]]:
    """Return, per method, its best rate, its loss there and at dense's best rate (over seeds)."""
    names = list(dict.fromkeys(row["name"] for row in comparable(rows)))
    of_dense = min(RATES, key=lambda rate: loss(rows, "identity", rate))
    found = {}
    for name in names:
        best = min(RATES, key=lambda rate: loss(rows, name, rate))
        found[name] = best, loss(rows, name, best), loss(rows, name, of_dense)
    return found


def agreement(rows: list[Row]) -> dict[str, list[float]]:
    """Return Kendall's τ per seed: dense's rate against own best, and what a seed alone changes."""
    seeds = sorted({row["seed"] for row in rows})
    names = sorted(tuned(rows))
    found: dict[str, list[float]] = {"tuning": [], "seed, dense's rate": [], "seed, own rate": []}
    ranked = [tuned([row for row in rows if row["seed"] == seed]) for seed in seeds]
    full = [each for each in ranked if set(names) <= set(each)]

    def tau(xs: list[float], ys: list[float]) -> float:
        return float(stats.kendalltau(xs, ys).statistic)

    for i, own in enumerate(full):
        found["tuning"].append(tau([own[n][2] for n in names], [own[n][1] for n in names]))
        for other in full[:i]:
            for column, kind in ((2, "seed, dense's rate"), (1, "seed, own rate")):
                xs, ys = ([each[n][column] for n in names] for each in (own, other))
                found[kind].append(tau(xs, ys))
    return found


def groups(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the groups within which measures are compared."""
    kinds = sorted({row["kind"] for row in rows} - {"dense"})
    found: dict[str, dict[str, Any]] = {"all": {}}
    found |= {"with feedback": {"feedback": True}, "without": {"feedback": False}}
    return found | {kind: {"kind": kind} for kind in kinds}


def best_rates(rows: list[Row], **what: Any) -> list[float]:
    """Return, per seed, the mean of log2 of the best rates of some compressors."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in comparable(rows) if row["seed"] == seed]
        names = {row["name"] for row in where(own, **what)}
        rates = [rate for name, (rate, _, _) in tuned(own).items() if name in names]
        found.append(statistics.fmean(map(math.log2, rates)) if rates else math.nan)
    return found


def thesis(rows: list[Row]) -> list[Claim]:
    """Hold Figures 5.7 and 5.9 of the thesis against these runs."""
    sparse = best_rates(rows, kind="sparsifier", feedback=True)
    found = []
    for text, theirs, what in (
        ("quantisers", "22 against 31", {"kind": "quantiser"}),
        ("dense", "22 against 28", {"name": "identity"}),
    ):
        other = best_rates(rows, **what)
        own, others = (spread([2**log for log in logs], ".1f") for logs in (sparse, other))
        text = f"thesis, 5.9: best rates of sparsifiers with feedback are lower than of {text}"
        said = f"{own} against {others} (geometric means)"
        found.append(Claim(text, theirs, said, verdict(sparse, other)))
    best = tuned(rows)
    for name in ("topk", "dgc"):
        runs = (where(rows, name=n, rate=best[n][0]) for n in (name, "identity"))
        low, high = (values(some, "train_loss") for some in runs)
        n = min(len(low), len(high))
        text = f"thesis, 5.7: {name} trains faster than dense at first; train loss, end of epoch 1"
        said = f"{spread(low, '.3f')} against {spread(high, '.3f')}"
        found.append(Claim(text, "by eye", said, verdict(low[:n], high[:n])))
    return found


def page(rows: list[Row]) -> str:
    """Return the tables."""
    lines = [
        [text, *(spread(correlations(rows, name, **what)) for what in groups(rows).values())]
        for name, text in MEASURES.items()
    ]
    text = (
        "## Does total error tell the loss?\n\nSpearman's ρ over compressors, mean and deviation "
    )
    text += "over rates and seeds (groups of five or more).\n\n"
    text += table(["", *groups(rows)], lines)
    found, dense = tuned(rows), tuned(rows)["identity"]
    text += "\n## Does tuning change rankings?\n\n"
    text += "Kendall's τ of two rankings, per seed or pair of seeds: "
    text += "; ".join(f"{name} {spread(taus)}" for name, taus in agreement(rows).items())
    text += f". Dense's best rate is {dense[0]:g}.\n\n"
    order = {n: i for i, n in enumerate(sorted(found, key=lambda n: found[n][2]), start=1)}
    lines = []
    for place, name in enumerate(sorted(found, key=lambda n: found[n][1]), start=1):
        best, own, shared = found[name]
        runs = where(rows, name=name, rate=best)
        lines.append(
            [
                name,
                f"{best:g}",
                spread(values(runs, "loss"), ".3f"),
                f"{shared:.3f}",
                f"{shared - own:.3f}",
                f"{place}",
                f"{order[name]}",
                f"{values(runs, 'bytes')[0]:,.0f}",
                spread(values(runs, "total_error_update"), ".3g"),
            ]
        )
    head = ["method", "best rate", "loss", "at dense's rate", "gain by tuning", "rank"]
    head += ["rank at dense's rate", "bytes", "Σγ²‖e‖²"]
    return text + table(head, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Answer both questions."""
    found = []
    for name in ("total_error", "total_error_update", "relative_error"):
        rho = correlations(rows, name)
        sparse = correlations(rows, name, kind="sparsifier", feedback=True)
        said = f"ρ = {spread(rho)} over all, {spread(sparse)} over sparsifiers with feedback"
        text = f"{MEASURES[name]} orders compressors as their loss does"
        found.append(Claim(text, "argued, for sparsifiers", said, answer(rho, 0.7, 0.3)))
    best = tuned(rows)
    for name, other in SAID:
        if not {name, other} <= best.keys():
            continue
        own, others = (values(where(rows, name=n, rate=best[n][0]), "loss") for n in (name, other))
        n = min(len(own), len(others))
        sent = [
            f"{statistics.fmean(row['bytes'] for row in where(rows, name=n)):,.0f}"
            for n in (name, other)
        ]
        said = f"{spread(own, '.3f')} with {sent[0]} bytes, {spread(others, '.3f')} with {sent[1]}"
        text = f"survey: {name} beats {other}; both at their best rates"
        found.append(Claim(text, "", said, verdict(own[:n], others[:n])))
    taus = agreement(rows)
    said = "; ".join(f"{name} τ = {spread(t)}" for name, t in taus.items())
    text = "tuning per method changes rankings more than a seed does (by τ of every seed)"
    alone = taus["seed, own rate"] + taus["seed, dense's rate"]
    apart = [b - statistics.fmean(taus["tuning"]) for b in alone] or [math.nan]
    result = "agrees" if min(apart) > 0 else "disagrees" if max(apart) < 0 else "cannot be told"
    result = "cannot be told" if any(map(math.isnan, apart)) else result
    found.append(Claim(text, "the thesis tunes each", said, result))
    return [*found, *thesis(rows)] if {"identity", "topk", "dgc"} <= best.keys() else found


def answer(numbers: list[float], high: float, low: float) -> str:
    """Agree where a correlation is high at all rates and seeds, disagree where it is low at all."""
    if not numbers:
        return "cannot be told"
    if min(numbers) > high:
        return f"agrees (all above {high})"
    return f"disagrees (all below {low})" if max(numbers) < low else "cannot be told"


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss against total error in both units at dense's best rate, seed by seed."""
    figure.set_size_inches(plot_style.WIDTH, 12)
    rate = tuned(rows)["identity"][0]
    found = {row["kind"] for row in rows}
    kinds = {k: plot_style.FAMILIES[k] for k in sorted(groups(rows)) if k in found}
    names = ("total_error_update", "relative_error")
    panels = dict(zip(figure.subplots(2, 1), names, strict=True))
    for ax, name in panels.items():
        for kind, colour in kinds.items():
            some = [r for r in where(comparable(rows), rate=rate, kind=kind) if r[name]]
            for mark, feeds in (("o", True), ("x", False)):
                points = [(r[name], r["loss"]) for r in some if r["feedback"] is feeds]
                if points:
                    label = f"{kind}, {'with' if feeds else 'no'} feedback"
                    ax.scatter(
                        *zip(*points, strict=True), marker=mark, color=colour, s=18, label=label
                    )
        dense = statistics.fmean(values(where(rows, name="identity", rate=rate), "loss"))
        ax.axhline(dense, color=plot_style.MUTED, lw=0.8)
        plot_style.plain_log(ax.xaxis)
        ax.set(xlabel=MEASURES[name], ylabel="validation loss")
        ax.set_title(f"Rate {rate:g}; the line is dense")
    plot_style.legend(figure)
    for ax, name in panels.items():
        some = [r for r in where(comparable(rows), rate=rate) if r["kind"] in kinds and r[name]]
        shown = [(r[name], r["loss"], "" if r["seed"] else r["name"]) for r in some]
        frame.label_points(ax, shown)


if __name__ == "__main__":
    sys.exit(frame.main(Experiment("rankings", ABOUT, cells, train, page, claims, draw)))
